"""Tokens that name how far a client has a stream, and answers that are replayed up to there in silence."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Message

from router.auth.auth import AuthContext, stream_marks
from router.dialects.openai.reply import OpenAIReply, error_body
from router.dialects.openai.schema import OpenAIRequest
from router.endpoints.answer import AnswerResponse
from router.metrics import RouterMetrics
from router.preparation.prepare import prepare
from router.requests.client_request import ClientRequest
from router.requests.request_handler import RequestHandler
from router.requests.resume import NoResumeTokens, Seeds, Sent, SentProgress, StreamPoint
from router.requests.work import Work
from router.serving.parent_request import Attempts, first_attempt
from router.text.output.events import TextEvent
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.unit.router.conftest import FACTS, ScriptedDispatcher
from twostroke.base.errors import InvalidRequest, WeightsChanged
from twostroke.request import SampledToken

SENT = st.one_of(st.just(Sent()), st.builds(Sent, tokens=st.integers(0, 10**6), is_finished=st.booleans()))


@settings(max_examples=40, deadline=None)
@given(
    st.text(min_size=1, max_size=256).filter(str.isprintable),
    st.integers(0, 4000),
    st.lists(SENT, min_size=1, max_size=20),
)
def test_what_a_token_says_is_read_again_and_it_fits_into_a_header(
    request_id: str, resumptions: int, sent: list[Sent]
) -> None:
    point = replace(StreamPoint.begin(request_id, len(sent)), resumptions=resumptions, sent=tuple(sent))
    progress = SentProgress(point)
    token = progress.finished(0)
    assert token.isascii()
    assert not set(token) & set(" \r\n")
    after = StreamPoint.after(token, len(sent), "resume_from")
    assert after == replace(
        point, resumptions=resumptions + 1, sent=(Sent(sent[0].tokens or 0, is_finished=True), *sent[1:])
    )
    assert after.request_id == request_id
    assert StreamPoint.after(progress.ended(), len(sent), "resume_from").is_complete


def test_many_choices_that_advance_together_make_a_short_token() -> None:
    progress = SentProgress(StreamPoint.begin("r", 1000))
    for choice in range(1000):
        token = progress.sent_token(choice)
    assert token.endswith(":0::" + ",".join(["1x32"] * 31 + ["1x8"]) + ":")
    assert StreamPoint.after(token, 1000, "resume_from").sent == (Sent(1),) * 1000


def test_a_token_costs_about_the_same_however_many_choices_there_are() -> None:
    """Each message costs this on the loop where all streams wait. Written from scratch it would be 32 times as much
    here."""
    few, many = (min(_step_s(choices) / choices for _ in range(5)) for choices in (32, 1024))
    assert many < 10 * few


def _step_s(choices: int) -> float:
    """Returns the seconds of this thread's own time: others run here, too."""
    draw = random.Random(choices)
    sent = tuple(Sent(draw.randrange(1000), draw.random() < 0.5) for _ in range(choices))
    progress = SentProgress(StreamPoint("r~0123456789abcdef", 0, sent))
    began_s = time.thread_time()
    for choice in range(choices):
        progress.sent_token(choice)
    return time.thread_time() - began_s


NAME = "r~0123456789abcdef"


@pytest.mark.parametrize(
    "token",
    [
        *("x", "r:0:1", f"{NAME}:0:", f"{NAME}:0:1", f"{NAME}:0:1,2,3", f"{NAME}:0:1x99999", f"{NAME}:-1:1,2"),
        *(f"{NAME}:9999:1,2", f"{NAME}:0:-e,1", f"{NAME}:0:1,²", f"{NAME}:0:1,2,", "~0123456789abcdef:0:1,2"),
        *(f"{NAME}:0:99999999999,1", f"{NAME}:²:1,2", "a" * 20_000, f"{'r' * 300}{NAME}:0:1,2", f"%0A{NAME}:0:1,2"),
    ],
)
def test_what_is_no_token_of_the_request_is_refused_by_its_fields_name(token: str) -> None:
    with pytest.raises(InvalidRequest, match="last-event-id must be what came with the last message") as refusal:
        StreamPoint.after(token, 2, "last-event-id")
    assert refusal.value.field == "last-event-id"
    assert len(refusal.value.message) < 300


def test_seeds_are_the_same_at_every_router_of_a_cluster_and_differ_by_stream_and_prompt() -> None:
    one, other = StreamPoint.begin("same", 1), StreamPoint.begin("same", 1)
    here, there = Seeds("token"), Seeds("token")
    assert here.seed_of(one, 0) == there.seed_of(one, 0)
    assert (
        len({here.seed_of(one, 0), here.seed_of(one, 1), here.seed_of(other, 0), Seeds("another").seed_of(one, 0)}) == 4
    )
    assert (
        Seeds("token", 7).seed_of(one, 0) == Seeds("another", 7).seed_of(other, 0) != Seeds("token", 8).seed_of(one, 0)
    )


def test_of_two_attempts_the_later_is_higher_whoever_makes_them_and_whatever_the_clocks_say() -> None:
    behind, ahead = Attempts(lambda: 10**15), Attempts(lambda: 10**18)
    begun = [ahead.next(first_attempt(0)) for _ in range(3)]
    assert begun == sorted(set(begun))
    resumed = behind.next(first_attempt(1))
    assert resumed > begun[-1], "a router that is left behind stays behind"
    assert behind.next(resumed + 10**12) == resumed + 10**12, "nor does a clock stay below what was found"
    assert first_attempt(4095) + 2**52 - 1 < 2**64


def test_a_router_whose_clock_is_behind_what_it_found_still_numbers_every_attempt_anew() -> None:
    """Else a late Close of the one that it gave up would end the next one, and nobody would be told."""
    behind = Attempts(lambda: 0)
    found = first_attempt(1) + 10**12
    assert [behind.next(found + 1) - found for _ in range(3)] == [1, 2, 3]


TEXTS = st.lists(st.sampled_from(["a", "b", "ab", "é", "猫", "🙂", "stop", "st", "op"]), max_size=14).map("".join)
STOPS = st.lists(st.sampled_from(["stop", "b🙂", "猫", "aab", "é"]), max_size=2, unique=True)


@pytest.mark.parametrize("has_logprobs", [True, False])
@pytest.mark.parametrize("is_chat", [True, False])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(texts=st.tuples(TEXTS, TEXTS), stops=STOPS, data=st.data())
async def test_an_answer_that_breaks_off_anywhere_goes_on_with_what_would_have_followed(
    is_chat: bool, has_logprobs: bool, texts: tuple[str, str], stops: list[str], data: st.DataObject
) -> None:
    """Two choices; characters and stop strings lie across tokens, and so across the break."""
    body: dict[str, Any] = {"stream": True, "n": 2, "stop": stops, "max_tokens": 40}
    body |= {"stream_options": {"include_usage": True}}
    if has_logprobs:
        body["logprobs"] = True if is_chat else 1
    body |= {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    events = await _events(body, texts, StreamPoint.begin("r", 2))
    broken = data.draw(st.integers(0, len(events)))
    kept = events[:broken]
    if not kept:
        return
    point = StreamPoint.after(kept[-1][0], 2, "last-event-id")
    assert [chunk for _, chunk in [*kept, *await _events(body, texts, point)]] == [chunk for _, chunk in events]


async def _events(body: dict[str, Any], texts: tuple[str, str], point: StreamPoint) -> list[tuple[str, Any]]:
    """Returns what follows `point` of a stream: ids and chunks."""

    def script(_: object, choice: int) -> list[SampledToken]:
        return [SampledToken(byte, -1.0, ((byte, -1.0),)) for byte in texts[choice].encode()]

    dispatcher = _Replaying(script=script)
    handler = RequestHandler(dispatcher, InlinePreparer(ByteText()), RouterMetrics(), model="toy", seeds=Seeds())
    wanted = _prepared(body)
    reply = OpenAIReply(wanted, point, "toy", ByteText(), SentProgress(point))
    events: list[tuple[str, Any]] = []

    class Events:
        is_ready = True

        def put(self, event: TextEvent) -> None:
            for message in filter(None, reply.messages(event).split("\n\n")):
                token, _, encoded = message.partition("\ndata: ")
                chunk = json.loads(encoded)
                if chunk.get("usage"):  # what was found cached, each life says for itself
                    del chunk["usage"]["prompt_tokens_details"]
                events.append((token.removeprefix("id: "), {**chunk, "created": 0}))

        def flush(self) -> None: ...

        async def drain(self) -> None: ...

    ask = ClientRequest(point=point, is_resumable=True, body=wanted)
    await handler.answer(ask, Events())
    return events


def _prepared(body: dict[str, Any]) -> OpenAIRequest:
    kind = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    prepared = prepare(Work(kind, json.dumps(body).encode(), "toy", FACTS), ByteText()).value
    assert isinstance(prepared, OpenAIRequest)
    return prepared


class _Replaying(ScriptedDispatcher):
    """Whatever a resumed stream has settled already is not played again."""

    async def generate(self, request, take=None):  # type: ignore[no-untyped-def]  # as its parent's
        async for event in super().generate(request):
            if event[0] not in request.ended_choices:
                yield event


async def test_an_answer_that_is_shorter_than_what_the_client_has_is_another_requests() -> None:
    point = replace(StreamPoint.begin("r", 2), resumptions=1, sent=(Sent(7), Sent(0)))
    with pytest.raises(InvalidRequest, match="answers another request"):
        await _events({"stream": True, "n": 2, "prompt": "x"}, ("short", "a longer one"), point)


async def test_what_a_token_says_was_sent_is_on_its_way_before_it_however_slowly_the_client_reads() -> None:
    """Prompts of one request are answered at once. Those that wait for a full socket wake up after whoever finds it
    writable: what uvicorn's flow control does."""
    handler = RequestHandler(ScriptedDispatcher(), InlinePreparer(ByteText()), RouterMetrics(), model="toy")
    wanted = _prepared({"stream": True, "prompt": ["x", "y", "z"], "max_tokens": 6})
    point = StreamPoint.begin("r", 3)
    ask = ClientRequest(point=point, is_resumable=True, body=wanted)
    reply = OpenAIReply(wanted, point, "toy", ByteText(), SentProgress(point))
    written, draws = "", random.Random(1)

    async def send(message: Message) -> None:
        nonlocal written
        for _ in range(draws.choice((0, 0, 5))):
            await asyncio.sleep(0)
        written += message.get("body", b"").decode()

    await AnswerResponse(handler, ask, lambda: reply, error_body, stream=True)({}, _never, send)
    sent = [Sent()] * 3
    for event in written.strip().split("\n\n")[:-1]:
        name, data = event.split("\ndata: ")
        (choice,) = json.loads(data)["choices"]
        had = sent[choice["index"]]
        is_end = choice["finish_reason"] is not None
        sent[choice["index"]] = Sent((had.tokens or 0) + (not is_end), is_end)
        assert StreamPoint.after(name.removeprefix("id: "), 3, "last-event-id").sent == tuple(sent)


async def _never() -> Message:
    return await asyncio.Future()


MARK = stream_marks("the cluster's token")("tenant")


def _told() -> str:
    point = StreamPoint.begin("r", 3, MARK)
    assert point.weights.fix("fingerprint", b"")
    progress = SentProgress(point)
    progress.opened(0)
    progress.sent_token(1)
    return progress.finished(2)


def test_a_token_is_read_as_it_was_sent_with_the_weights_that_answered() -> None:
    after = StreamPoint.after(_told(), 3, "resume_from", MARK)
    assert after.sent == (Sent(0), Sent(1), Sent(0, is_finished=True))
    assert after.weights.admit("fingerprint", b"")
    assert not after.weights.admit("another fingerprint", b"")


@pytest.mark.parametrize(
    "forge",
    [
        lambda name, resumed, weights, sent, mark: (name, resumed, weights, "1000000,1,0e", mark),
        lambda name, resumed, weights, sent, mark: (name, resumed, weights, "1000000x3", mark),
        lambda name, resumed, weights, sent, mark: (name, resumed, weights, "0,1,1000000e", mark),
        lambda name, resumed, weights, sent, mark: (name, resumed, weights, "-,-,-", mark),
        lambda name, resumed, weights, sent, mark: (name, resumed, weights, "end", mark),
        lambda name, resumed, weights, sent, mark: (name, "4000", weights, sent, mark),
        lambda name, resumed, weights, sent, mark: (name, resumed, "0" * 16, sent, mark),
        lambda name, resumed, weights, sent, mark: (name, resumed, "", sent, mark),
        lambda name, resumed, weights, sent, mark: (name, resumed, weights, sent, ""),
        lambda name, resumed, weights, sent, mark: (name, resumed, weights, sent, mark[:-1]),
        lambda name, resumed, weights, sent, mark: (name, resumed, weights, sent),
        lambda name, resumed, weights, sent, mark: (name, resumed, weights, sent, name.rpartition(".")[2]),
    ],
)  # fmt: skip
def test_a_client_cannot_say_anything_else_than_it_was_told(forge: Any) -> None:
    forged = ":".join(forge(*_told().split(":")))
    with pytest.raises(InvalidRequest, match="resume_from must be what came with the last message"):
        StreamPoint.after(forged, 3, "resume_from", MARK)


def test_a_mark_of_a_streams_name_marks_no_token() -> None:
    """A client chooses its request's id, and so what the mark of a name is made of."""
    wanted = "r~0123456789abcdef:0::7"
    point = StreamPoint.begin(wanted, 1, MARK)
    name, _, mark = point.stream.rpartition(".")
    for said in (wanted, name):
        with pytest.raises(InvalidRequest):
            StreamPoint.after(f"{said}:{mark}", 1, "resume_from", MARK)


@pytest.mark.parametrize(("is_recovered", "charged"), [(False, 1 + 12 + 12), (True, 1 + 12 + 12 - 9)])
async def test_what_is_computed_once_more_for_a_resumed_stream_counts_and_what_a_worker_has_does_not(
    is_recovered: bool, charged: int
) -> None:
    """A token that was sent can be sent again and again, also when no worker has the stream any more."""

    def script(_: object, choice: int) -> list[SampledToken]:
        return [SampledToken(65)] * 12

    class Dispatcher(_Replaying):
        async def generate(self, request, take=None):  # type: ignore[no-untyped-def]  # as its parent's
            async for choice, delta in super().generate(request):
                yield choice, delta._replace(is_recovered=is_recovered)

    metrics = RouterMetrics()
    dispatcher = Dispatcher(script=script)
    handler = RequestHandler(dispatcher, InlinePreparer(ByteText()), metrics, model="toy", seeds=Seeds())
    wanted = _prepared({"stream": True, "prompt": "x", "n": 3, "max_tokens": 12})
    sent = (Sent(5), Sent(12, is_finished=True), Sent(4))
    point = replace(StreamPoint.begin("r", 3), resumptions=1, sent=sent)
    spent: list[int] = []
    auth = AuthContext(spend=spent.append)
    ask = ClientRequest(point=point, is_resumable=True, body=wanted, auth=auth)
    reply = OpenAIReply(wanted, point, "toy", ByteText(), SentProgress(point))
    await AnswerResponse(handler, ask, lambda: reply, error_body, stream=True)({}, _never, _sent)
    assert sum(spent) == charged
    counted = {
        name: metrics.registry.get_sample_value(f"twostroke_{name}", {"role": "router"})
        for name in ("prompt_tokens_total", "generation_tokens_total", "ttft_seconds_count")
    }
    counted_once = {"prompt_tokens_total": 0, "generation_tokens_total": 7 + 8, "ttft_seconds_count": 0}
    assert counted == counted_once, "the router before has counted the prompt, and what the client has"


async def _sent(message: Message) -> None: ...


async def test_a_whole_answer_begins_anew_where_its_weights_are_replaced() -> None:
    """Its client has nothing yet; what came of the old weights is in no reply."""

    class Reloading(ScriptedDispatcher):
        calls = 0

        async def generate(self, request, take=None):  # type: ignore[no-untyped-def]  # as its parent's
            self.calls += 1
            assert request.weights.fix(f"weights {self.calls}", b"")
            async for choice, delta in super().generate(request):
                yield choice, delta
                if self.calls < 3:
                    raise WeightsChanged("replaced")

    dispatcher = Reloading(script=lambda _, choice: [SampledToken(byte) for byte in b"new"])
    handler = RequestHandler(dispatcher, InlinePreparer(ByteText()), RouterMetrics(), model="toy", seeds=Seeds())
    wanted = _prepared({"prompt": "x", "max_tokens": 3})
    point = StreamPoint.begin("r", 1)
    ask = ClientRequest(point=point, body=wanted)
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    def reply() -> OpenAIReply:
        return OpenAIReply(wanted, point, "toy", ByteText(), NoResumeTokens())

    await AnswerResponse(handler, ask, reply, error_body, stream=False)({"type": "http"}, _never, send)
    body = json.loads(messages[-1]["body"])
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == ("new", 3)
    assert dispatcher.calls == 3
