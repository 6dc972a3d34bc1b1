"""Answers without a worker around them."""

from __future__ import annotations

from decode_worker.request_state import RequestState, RequestTrace
from twostroke.base.ids import RequestId, SessionId
from twostroke.kv_cache.block import block_hashes_of
from twostroke.request import Attempt, FinishReason, GenerateRequest, SampledToken, SamplingParams
from twostroke.scheduler.sequence import Sequence
from twostroke.tracing.recorder import Recorder


def an_answer(
    request_id: str = "r", *, prompt: int = 40, emitted: int = 0, router_id: str = "router-0"
) -> RequestState:
    tokens, sampling = tuple(range(prompt)), SamplingParams(seed=1, max_tokens=100)
    known = [*tokens, *range(emitted)]
    hashes = block_hashes_of(known, 16)
    attempt = Attempt(
        request=GenerateRequest(prompt=tokens, sampling=sampling),
        request_id=RequestId(request_id),
        number=0,
        emitted=tuple(SampledToken(token) for token in range(emitted)),
        block_hashes=tuple(hashes),
        router_id=router_id,
    )
    sequence = Sequence(attempt.request_id, SessionId(1), known, prompt, hashes, b"", sampling)
    return RequestState(attempt, sequence, None, 16, RequestTrace(Recorder(), attempt))


def grow(answer: RequestState, *tokens: int, finish: FinishReason | None = None) -> None:
    answer.tokens += [SampledToken(token) for token in tokens]
    answer.finish = finish
