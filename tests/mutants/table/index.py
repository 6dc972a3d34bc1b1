"""What routers know of workers: event logs, the index, epochs, and who is alive."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        name="digest-blind-to-tiers",
        claim="the router's index equals every worker's cache, tier by tier",
        file="twostroke/kv_cache/events.py",
        old="return ((value << bits) | (value >> (_HASH_BITS - bits))) & _HASH_MASK if bits else value",
        new="return value",
        test=(
            "tests/unit/kv_cache/test_events.py::test_a_block_that_moves_between_tiers_changes_the_digest_by_whole_turns_of_its_name"
        ),
    ),
    Mutant(
        name="replay-with-a-gap",
        claim="a reader that lost batches learns it",
        file="twostroke/kv_cache/events.py",
        old="if not self._ring or not self._ring[0].sequence <= start_sequence <= self._sequence:",
        new="if not self._ring or not self._ring[0].sequence <= start_sequence + 1 <= self._sequence + 1:",
        test="tests/unit/kv_cache/test_events.py::test_there_is_no_replay_of_what_has_not_happened_or_never_will",
    ),
    Mutant(
        name="batch-of-8192-blocks",
        claim="an event batch tells all blocks, however many there are",
        file="twostroke/kv_cache/events.py",
        old="while start < blocks:",
        new="if start < blocks:",
        test=(
            "tests/unit/kv_cache/test_events.py::test_a_snapshot_of_many_blocks_comes_in_bounded_parts_that_only_the_last_one_ends"
        ),
    ),
    Mutant(
        name="snapshot-that-changes",
        claim="a snapshot is the set as of one moment",
        file="twostroke/kv_cache/events.py",
        old="if bucket >= self._next and bucket not in self._kept:",
        new="if bucket > self._next and bucket not in self._kept:",
        test=("tests/unit/kv_cache/test_events.py::test_a_snapshot_is_of_one_moment_whatever_changes_while_it_is_read"),
    ),
    Mutant(
        name="index-digest-not-compared",
        claim="the router's index is proved equal after every batch",
        file="router/routing/prefix_index.py",
        old='if held.block_count != batch.block_count or held.xor != int.from_bytes(batch.digest, "big"):',
        new="if held.block_count != batch.block_count:",
        test=(
            "tests/unit/router/routing/test_prefix_index.py::test_a_batch_that_does_not_add_up_makes_the_index_ask_for_a_snapshot"
        ),
    ),
    Mutant(
        name="index-takes-gaps",
        claim="a lost batch is noticed",
        file="router/routing/prefix_index.py",
        old="batch.sequence > held.sequence + 1:",
        new="batch.sequence > held.sequence + 2:",
        test=(
            "tests/unit/router/routing/test_prefix_index_histories.py::test_after_any_history_the_index_equals_every_worker_and_a_scan"
        ),
    ),
    Mutant(
        name="index-keeps-the-gone",
        claim="nothing is routed to what a dead worker held",
        file="router/routing/prefix_index.py",
        old="mask &= ~gone",
        new="mask &= -1",
        test=(
            "tests/unit/router/routing/test_prefix_index.py::test_a_worker_that_comes_while_another_is_swept_does_not_get_its_blocks"
        ),
    ),
    Mutant(
        name="index-takes-earlier-epochs",
        claim="an earlier epoch changes nothing",
        file="router/routing/prefix_index.py",
        old=("if held.epoch != epoch:\n            return Applied.OLD"),
        new=("if held.epoch < epoch:\n            return Applied.OLD"),
        test=(
            "tests/unit/router/routing/test_prefix_index.py::test_a_later_life_begins_without_the_earlier_ones_blocks"
        ),
    ),
    Mutant(
        name="search-loses-holders",
        claim="the router finds the longest prefix of every worker",
        file="router/routing/prefix_index.py",
        old="if at_low != at_middle:",
        new="if at_low != at_middle and not brackets:",
        test="tests/unit/router/routing/test_exponential_search.py::test_holders_of_prefixes_are_found_exactly",
    ),
    Mutant(
        name="fleet-takes-earlier-epochs",
        claim="a worker that comes back is known by its epoch",
        file="router/fleet/fleet.py",
        old="if epoch < self._latest.get(worker_id, epoch):",
        new="if epoch > self._latest.get(worker_id, epoch):",
        test="tests/unit/router/serving/test_fleet.py::test_an_earlier_life_is_refused_and_counted",
    ),
    Mutant(
        name="fleet-takes-other-weights",
        claim="a worker of another model is refused",
        file="router/fleet/fleet.py",
        old="if shown != self.fingerprint and not worker.has_other_weights:",
        new="if not shown:",
        test="tests/unit/router/serving/test_fleet.py::test_a_worker_with_another_fingerprint_is_refused_loudly",
    ),
    Mutant(
        name="slow-is-dead",
        claim="a worker that is merely slow is not replaced",
        file="router/fleet/liveness.py",
        old="silence_s = min(self.silence_s(signal, now_s) for signal in Signal)",
        new="silence_s = max(self.silence_s(signal, now_s) for signal in Signal)",
        test=(
            "tests/unit/router/fleet/test_liveness.py::test_tokens_keep_a_worker_from_being_dead_but_not_from_being_suspect"
        ),
    ),
    Mutant(
        name="own-lateness-counts",
        claim="a router that was frozen does not think its workers dead",
        file="router/fleet/liveness.py",
        old="counted_s = min(passed_s, self.tick_s)",
        new="counted_s = passed_s",
        test="tests/unit/router/fleet/test_liveness.py::test_a_listener_that_was_late_blames_nobody",
    ),
    Mutant(
        name="one-refusal-is-death",
        claim="one refused connection is not a death",
        file="router/fleet/liveness.py",
        old="if self._refusals < REFUSALS or",
        new="if not self._refusals or",
        test=(
            "tests/unit/router/fleet/test_liveness.py::test_a_broken_stream_makes_suspect_and_refusals_in_a_row_make_dead"
        ),
    ),
    Mutant(
        name="worker-takes-other-epochs",
        claim="stale epochs are refused everywhere",
        file="twostroke/worker/request_validator.py",
        old="if epoch and epoch != str(self.epoch):",
        new="if epoch and epoch > str(self.epoch):",
        test="tests/unit/worker/test_request_validator.py::test_calls_for_an_earlier_or_a_later_life_are_refused",
    ),
    Mutant(
        name="worker-takes-other-fingerprints",
        claim="workers of different models refuse each other",
        file="twostroke/worker/request_validator.py",
        old="if fingerprint != self.fingerprint:",
        new="if not fingerprint:",
        test="tests/unit/worker/test_request_validator.py::test_callers_with_another_model_are_refused",
    ),
    Mutant(
        name="source-of-an-earlier-epoch",
        claim="stale epochs are refused everywhere",
        file="twostroke/worker/pulls/pull_client.py",
        old="if known_epoch is not None and epoch.incarnation < known_epoch.incarnation:",
        new="if known_epoch is not None and epoch.incarnation + 1000 < known_epoch.incarnation:",
        test=(
            "tests/unit/worker/pulls/test_pull_client.py::test_an_earlier_life_does_not_displace_the_link_to_a_later_one"
        ),
    ),
    Mutant(
        name="attempts-follow-clocks-alone",
        claim="a later attempt has the higher number",
        file="router/serving/parent_request.py",
        old="self._latest = max(self._latest + 1, self._clock_ns() // 1000, at_least - begin)",
        new="self._latest = max(self._clock_ns() // 1000, at_least - begin)",
        test=(
            "tests/unit/router/serving/test_dispatch.py::test_a_prompt_seen_before_is_reused_and_goes_to_the_same_worker"
        ),
    ),
    Mutant(
        name="right-amid-parts",
        claim="routers tell each other whole sets of blocks alone",
        file="router/routing/prefix_index.py",
        old="held.sequence, held.awaited = None, (batch.sequence, batch.part + 1)",
        new="held.awaited = (batch.sequence, batch.part + 1)",
        test=(
            "tests/unit/router/routing/test_event_parts.py::test_an_index_that_was_right_is_not_amid_the_parts_of_what_follows"
        ),
    ),
    Mutant(
        name="first-epoch-is-the-fleets-fence",
        claim="an earlier epoch of a worker is refused by routers",
        file="router/fleet/fleet.py",
        old="        self._latest[worker.worker_id] = worker.epoch\n",
        new="        self._latest.setdefault(worker.worker_id, worker.epoch)\n",
        test=("tests/unit/router/serving/test_fleet.py::test_an_earlier_life_is_refused_and_counted[True]"),
    ),
)
