"""Finds what decode workers still have of a stream, for the router at which its client resumes it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from router.fleet.worker_link import WorkerLink
from router.serving.parent_request import ParentRequest, changed
from twostroke.base.errors import InvalidRequest, ServeError
from twostroke.request import FinishReason, PromptLogprobs, SampledToken, SamplingParams
from twostroke.rpc.convert import prompt_logprobs_from_message, request_from_message, token_from_message
from twostroke.rpc.v1 import worker_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """The latest attempt of one choice that any worker has."""

    link: WorkerLink
    attempt: int
    tokens: tuple[SampledToken, ...]
    """The whole output so far."""
    finish: FinishReason | None
    """Why the attempt ended. None: it continues."""
    cached_tokens: int
    most_tokens: int
    """Most tokens of the output."""
    prompt_logprobs: PromptLogprobs | None = None
    """Logprobs of the prompt, if the client wants them and there are tokens."""


async def recover(links: Iterable[WorkerLink], parent: ParentRequest) -> dict[int, Recovered]:
    """Returns the latest attempt of each choice that any worker has. Workers that do not answer in time are left out.

    Raises InvalidRequest if a worker has the stream with another prompt or other sampling, and WeightsChanged if it has
    other weights than the request's model name stands for now.
    """
    asked = list(links)
    answers = await asyncio.gather(*(_find(link, parent.request_id) for link in asked))
    choices = {f"{parent.request_id}#{choice}": choice for choice in parent.open_choices}
    recovered: dict[int, Recovered] = {}
    for link, messages in zip(asked, answers, strict=True):
        for message in messages:
            choice = choices.get(message.request_id)
            if choice is None:
                continue
            one = _read(link, message, parent, choice)
            if one.tokens and one.prompt_logprobs is None and parent.request.scores_prompt:
                continue  # prompt_logprobs went to the lost router: both are computed again, with the same result
            if choice not in recovered or _progress(one) > _progress(recovered[choice]):
                recovered[choice] = one
    return recovered


async def _find(link: WorkerLink, stream: str) -> list[worker_pb2.RequestSnapshot]:
    try:
        return await link.find(stream)
    except ServeError as error:
        log.warning("worker not asked for stream=%s worker=%s error=%s", stream, link.worker_id, error.label())
        return []


def _read(link: WorkerLink, message: worker_pb2.RequestSnapshot, parent: ParentRequest, choice: int) -> Recovered:
    found, wanted = request_from_message(message.request), parent.request.of_choice(choice)
    if found.prompt != wanted.prompt or not _is_same(found.sampling, wanted.sampling):
        raise InvalidRequest("the stream that is to be resumed answers another request", field="resume_from")
    if found.own_weights != wanted.own_weights:
        raise changed(parent.request_id)
    return Recovered(
        link=link,
        attempt=message.attempt,
        tokens=tuple(token_from_message(token) for token in message.tokens),
        finish=FinishReason(message.finish_reason) if message.finish_reason else None,
        cached_tokens=message.cached_tokens,
        most_tokens=found.sampling.max_tokens,
        prompt_logprobs=(
            prompt_logprobs_from_message(message.prompt_logprobs) if message.HasField("prompt_logprobs") else None
        ),
    )


def _is_same(found: SamplingParams, wanted: SamplingParams) -> bool:
    """Compares all but `max_tokens`: if the client gave none, its value depends on when the stream began."""
    return _comparable(found, wanted.max_tokens) == _comparable(wanted, wanted.max_tokens)


def _comparable(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    """Returns the sampling with this length, and with a sorted bias, since maps in Protobuf have no order."""
    return dataclasses.replace(sampling, max_tokens=max_tokens, logit_bias=tuple(sorted(sampling.logit_bias)))


def _progress(recovered: Recovered) -> tuple[int, int]:
    return recovered.attempt, len(recovered.tokens)
