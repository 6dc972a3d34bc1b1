"""The usage of a request with several answers, of whose prompt more was cached for some than for others."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator

import pytest

from router.fleet.token_stream import TokenDelta
from router.serving.parent_request import ParentRequest
from tests.unit.router.conftest import Frontend, ScriptedDispatcher
from twostroke.request import FinishReason
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc


@pytest.fixture
def uneven(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> Frontend:
    """Each answer has found six tokens more in the cache than the one before, and says so at both of its ends."""
    found = itertools.cycle((2, 8, 14))
    monkeypatch.setattr(
        type(frontend.dispatcher), "cached_tokens", property(lambda _: next(found), lambda *_: None), raising=False
    )
    return frontend


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a long enough prompt"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a long enough prompt"}]}),
    ],
)
async def test_cached_tokens_of_several_answers_are_those_of_the_one_that_found_fewest(
    uneven: Frontend, path: str, body: dict[str, object]
) -> None:
    """Later answers always reuse the first one's blocks, which were computed for this request."""
    usage = (await uneven.http.post(path, json=body | {"n": 3, "max_tokens": 4})).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    assert usage["completion_tokens"] == 3 * 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12


async def test_over_grpc_it_is_the_same(uneven: Frontend) -> None:
    request = inference_pb2.GenerateRequest(text="a long enough prompt", n=3, stop={"max_tokens": 4})
    messages = [message async for message in inference_pb2_grpc.InferenceStub(uneven.channel).Generate(request)]
    assert (messages[-1].usage.cached_tokens, messages[-1].usage.completion_tokens) == (2, 12)


async def test_tokens_that_came_with_a_stop_string_and_behind_it_are_neither_shown_nor_counted(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker sends several tokens at once where a step has run a draft."""

    async def play(dispatcher: ScriptedDispatcher, request: ParentRequest) -> AsyncIterator[tuple[int, TokenDelta]]:
        tokens = tuple(dispatcher.script(request.request, 0))
        yield 0, TokenDelta(0, tokens)
        yield 0, TokenDelta(len(tokens), (), FinishReason.STOP)

    monkeypatch.setattr(type(frontend.dispatcher), "_play", play)
    answer = (await frontend.http.post("/v1/completions", json={"prompt": "a", "stop": "ll"})).json()
    assert answer["choices"][0]["text"] == "he"
    assert answer["usage"]["completion_tokens"] == len("hell")
