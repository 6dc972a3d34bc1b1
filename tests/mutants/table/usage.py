"""What clients use: limits and connections, texts that are known, and counts of tokens."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        name="idle-key-saves-up",
        claim="a key has no more than a minute's worth at once",
        file="router/auth/key_uses.py",
        old="self.amount = max(0.0, self.amount - max(0.0, now_s - self.at_s) * per_minute / 60)",
        new="self.amount -= max(0.0, now_s - self.at_s) * per_minute / 60",
        test=("tests/unit/router/auth/test_limits.py::test_a_key_that_was_idle_saves_up_no_more_than_a_minutes_worth"),
    ),
    Mutant(
        name="pause-that-ended-cuts-off",
        claim="a client that takes of its answer again is not cut off",
        file="router/http_server/protocol.py",
        old="        self._writable.set()\n        self._reader.stop()\n",
        new="        self._writable.set()\n",
        test=(
            "tests/unit/router/http_server/test_slow_clients.py::test_who_takes_of_its_answer_again_is_not_cut_off_for_an_earlier_pause"
        ),
    ),
    Mutant(
        name="answers-in-the-time-of-heads",
        claim="an answer may take longer than a request",
        file="router/http_server/protocol.py",
        old="        self._answering = exchange\n        self._timer.stop()\n",
        new="        self._answering = exchange\n",
        test=("tests/unit/router/http_server/test_slow_clients.py::test_an_answer_may_take_longer_than_a_request"),
    ),
    Mutant(
        name="segments-behind-a-gap",
        claim="a prompt has the same tokens, whatever of it was prepared before",
        file="router/preparation/prepared_texts.py",
        old="            if value is None:\n                break\n",
        new="            if value is None:\n                continue\n",
        test=(
            "tests/unit/router/preparation/test_prepared_texts.py::test_nothing_is_found_behind_a_segment_that_is_gone"
        ),
    ),
    Mutant(
        name="resumed-prompts-count-again",
        claim="a resumed stream is counted once",
        file="router/requests/request_output.py",
        old=(
            "        if not parent.resumptions:\n"
            "            self._metrics.prompt_tokens_total.inc(len(parent.request.prompt))\n"
        ),
        new="        self._metrics.prompt_tokens_total.inc(len(parent.request.prompt))\n",
        test=(
            "tests/unit/router/requests/test_resume.py::test_what_is_computed_once_more_for_a_resumed_stream_counts_and_what_a_worker_has_does_not"
        ),
    ),
    Mutant(
        name="logprobs-of-one-response",
        claim="KServe's cumulative logprob covers the whole answer",
        file="router/dialects/kserve/answer_parts.py",
        old="            choice.texts.clear()\n            choice.tokens.clear()\n",
        new="            choice.texts.clear()\n            choice.tokens.clear()\n            choice.logprob = 0.0\n",
        test=(
            "tests/unit/router/dialects/kserve/test_infer.py::test_a_streams_responses_count_their_own_tokens_and_sum_the_logprobs_of_all"
        ),
    ),
    Mutant(
        name="ignored-calls-are-busy",
        claim="no stranger keeps clients off the gRPC port",
        file="router/grpc_listener/connection.py",
        old="if kind == HEADERS and stream % 2 == 0:",
        new="if kind == HEADERS and stream == 0:",
        test="tests/unit/router/grpc_listener/test_listener.py::test_calls_that_grpc_ignores_keep_nobody_out",
    ),
    Mutant(
        name="hand-over-cuts-grpc",
        claim="a rolling restart fails no request",
        file="router/server.py",
        old="await asyncio.gather(self._http.leave(grace_s), asyncio.wait(stopping[:1], timeout=grace_s))",
        new="await self._http.leave(grace_s)",
        test="tests/unit/router/test_leaving.py::test_a_client_that_reads_slowly_gets_its_whole_answer_over_grpc",
    ),
)
