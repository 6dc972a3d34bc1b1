"""Logprobs of a prompt where a stream is resumed: found with its tokens, or computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from router.fleet.worker_link import WorkerLink
from router.serving.parent_request import ParentRequest
from router.serving.recovery import Recovered, recover
from twostroke.request import GenerateRequest, PromptLogprobs, SamplingParams
from twostroke.rpc.convert import prompt_logprobs_to_message, request_to_message
from twostroke.rpc.v1 import worker_pb2

SCORES = PromptLogprobs.of([-0.5], [2], [7], [-0.25])
WANTED = GenerateRequest(prompt=(1, 2), sampling=SamplingParams(seed=1, max_tokens=9, prompt_logprobs=1))
REQUEST = ParentRequest(request_id="r", request=WANTED)


@dataclass
class FoundAt:
    """A link to a worker that has this of the request."""

    snapshot: worker_pb2.RequestSnapshot
    worker_id: str = "decode-0"

    async def find(self, stream: str) -> list[worker_pb2.RequestSnapshot]:
        return [self.snapshot]


async def found(tokens: list[int], scores: PromptLogprobs | None) -> Recovered | None:
    snapshot = worker_pb2.RequestSnapshot(
        request_id="r#0",
        request=request_to_message(WANTED),
        tokens=[worker_pb2.Token(id=token) for token in tokens],
        prompt_logprobs=None if scores is None else prompt_logprobs_to_message(scores),
    )
    return (await recover([cast("WorkerLink", FoundAt(snapshot))], REQUEST)).get(0)


async def test_they_are_recovered_with_the_tokens() -> None:
    recovered = await found([5], SCORES)
    assert recovered is not None
    assert recovered.prompt_logprobs == SCORES


async def test_an_attempt_that_has_not_begun_is_recovered_as_it_is() -> None:
    assert await found([], None) is not None


async def test_an_answer_whose_scores_went_to_a_router_that_is_gone_is_computed_again() -> None:
    assert await found([5], None) is None
