"""A router takes over the answer that a worker still has of a stream: the latest one, and of the same request alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from router.serving.parent_request import ParentRequest
from router.serving.recovery import recover
from twostroke.base.errors import InvalidRequest, WeightsChanged
from twostroke.request import GenerateRequest, SampledToken, SamplingParams, WeightsRef
from twostroke.rpc.convert import request_to_message, tokens_to_messages
from twostroke.rpc.v1 import worker_pb2

SAMPLING = SamplingParams(seed=7, max_tokens=20, temperature=0.5, logit_bias=((3, 1.0), (1, 2.0)))
WANTED = GenerateRequest(prompt=(1, 2, 3), sampling=SAMPLING)
REQUEST = ParentRequest(request_id="s", request=WANTED, resumptions=1)
ADAPTER = WeightsRef(b"a" * 16)


@dataclass
class Link:
    """A worker that has these answers."""

    answers: list[worker_pb2.RequestSnapshot]
    worker_id: str = "decode-0"

    async def find(self, stream: str) -> list[worker_pb2.RequestSnapshot]:
        assert stream == "s"
        return self.answers


def snapshot(tokens: tuple[int, ...] = (5, 6), attempt: int = 1, **changes: object) -> worker_pb2.RequestSnapshot:
    return worker_pb2.RequestSnapshot(
        request_id="s#0",
        attempt=attempt,
        request=request_to_message(replace(WANTED, **changes)),
        tokens=tokens_to_messages([SampledToken(token) for token in tokens]),
    )


async def test_the_latest_attempt_is_taken_over_and_of_one_that_moved_the_longer_answer() -> None:
    early, late = Link([snapshot((5, 6, 7), attempt=1)]), Link([snapshot((5,), attempt=2)])
    longer = Link([snapshot((5, 6), attempt=2)])
    for links in ([early, late, longer], [longer, late, early]):
        found = (await recover(links, REQUEST))[0]
        assert (found.attempt, [token.token for token in found.tokens]) == (2, [5, 6])


CHANGES = [
    {"seed": 8}, {"temperature": 0.6}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 1.0},
    {"frequency_penalty": 1.0}, {"repetition_penalty": 1.5}, {"logit_bias": ((3, 1.0),)}, {"ignore_eos": True},
    {"stop_token_ids": (4,)}, {"min_tokens": 2}, {"logprobs": 3},
]  # fmt: skip


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
async def test_an_answer_to_other_sampling_is_no_answer_to_this_request(changes: dict[str, object]) -> None:
    link = Link([snapshot(sampling=replace(SAMPLING, **changes))])
    with pytest.raises(InvalidRequest, match="answers another request"):
        await recover([link], REQUEST)


@pytest.mark.parametrize("prompt", [(1, 2, 4), (1, 2), (1, 2, 3, 4), (3, 2, 1)])
async def test_an_answer_to_another_prompt_is_no_answer_to_this_request(prompt: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="answers another request"):
        await recover([Link([snapshot(prompt=prompt)])], REQUEST)


async def test_an_answer_of_another_adapter_is_no_answer_to_this_request() -> None:
    of_adapter = Link([snapshot(weights=ADAPTER)])
    wanted = replace(REQUEST, request=replace(WANTED, weights=ADAPTER))
    for link, request in ((of_adapter, REQUEST), (Link([snapshot()]), wanted)):
        with pytest.raises(WeightsChanged, match="begun with weights, or an adapter, that were replaced"):
            await recover([link], request)
    assert (await recover([of_adapter], wanted))[0].attempt == 1


async def test_the_same_request_has_room_as_when_it_began_and_its_bias_in_any_order() -> None:
    found = snapshot(sampling=replace(SAMPLING, max_tokens=9, logit_bias=((1, 2.0), (3, 1.0))))
    assert (await recover([Link([found])], REQUEST))[0].most_tokens == 9
