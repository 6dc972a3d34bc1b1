"""What decode workers still know of a stream whose router is gone, for the router that goes on with it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from router.fleet.worker_link import WorkerLink
from router.serving.generate_request import GenerationRequest
from twostroke.errors import InvalidRequest, ServeError
from twostroke.request import FinishReason, SampledToken, SamplingParams
from twostroke.rpc.convert import sampling_from_message, token_from_message
from twostroke.rpc.v1 import worker_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """The latest attempt at one choice that a worker has."""

    link: WorkerLink
    attempt: int
    tokens: tuple[SampledToken, ...]
    """The whole answer so far."""
    finish: FinishReason | None
    """None while it goes on."""
    cached_tokens: int
    most_tokens: int
    """That it may have."""


async def find(links: Iterable[WorkerLink], request: GenerationRequest) -> dict[int, Found]:
    """The best that any of the workers has, by choice; workers that do not answer in time have nothing.

    Raises InvalidRequest where what they have is an answer to another request.
    """
    asked = list(links)
    answers = await asyncio.gather(*(_ask(link, request.request_id) for link in asked))
    found: dict[int, Found] = {}
    for link, messages in zip(asked, answers, strict=True):
        for message in messages:
            choice = _choice(message, request)
            if choice is None or choice in request.settled:
                continue
            one = _read(link, message, request, choice)
            if choice not in found or _rank(one) > _rank(found[choice]):
                found[choice] = one
    return found


async def _ask(link: WorkerLink, stream: str) -> list[worker_pb2.FoundAnswer]:
    try:
        return await link.find(stream)
    except ServeError as error:
        log.warning("not asked for stream=%s worker=%s error=%s", stream, link.worker, error)
        return []


def _choice(message: worker_pb2.FoundAnswer, request: GenerationRequest) -> int | None:
    """Only what this request itself could have begun is its own."""
    for choice in range(len(request.sampling)):
        if message.request_id == f"{request.request_id}#{choice}":
            return choice
    return None


def _read(link: WorkerLink, message: worker_pb2.FoundAnswer, request: GenerationRequest, choice: int) -> Found:
    sampling = sampling_from_message(message.sampling)
    if tuple(message.prompt) != request.prompt or not _is_same(sampling, request.sampling[choice]):
        raise InvalidRequest("the stream that is to be resumed answers another request", field="resume_from")
    return Found(
        link=link,
        attempt=message.attempt,
        tokens=tuple(token_from_message(token) for token in message.tokens),
        finish=FinishReason(message.finish_reason) if message.finish_reason else None,
        cached_tokens=message.cached_tokens,
        most_tokens=sampling.max_tokens,
    )


def _is_same(found: SamplingParams, wanted: SamplingParams) -> bool:
    """But for the length: where the client named none, it is what had room when the stream began."""
    return _comparable(found, wanted.max_tokens) == _comparable(wanted, wanted.max_tokens)


def _comparable(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    """Protobuf's maps have no order."""
    return dataclasses.replace(sampling, max_tokens=max_tokens, logit_bias=tuple(sorted(sampling.logit_bias)))


def _rank(found: Found) -> tuple[int, int]:
    return found.attempt, len(found.tokens)
