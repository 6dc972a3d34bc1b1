"""Answers without a worker around them."""

from __future__ import annotations

from decode_worker.answer import Answer
from decode_worker.answer_trace import AnswerTrace
from twostroke.ids import RequestId, SessionId
from twostroke.kv_cache.block import name_blocks
from twostroke.request import FinishReason, Request, SampledToken, SamplingParams
from twostroke.schedule.sequence import Sequence
from twostroke.tracing.recorder import Recorder


def an_answer(request_id: str = "r", *, prompt: int = 40, emitted: int = 0, router_id: str = "router-0") -> Answer:
    tokens, sampling = tuple(range(prompt)), SamplingParams(seed=1, max_tokens=100)
    known = [*tokens, *range(emitted)]
    names = name_blocks(known, 16)
    request = Request(
        request_id=RequestId(request_id),
        attempt=0,
        prompt=tokens,
        emitted=tuple(SampledToken(token) for token in range(emitted)),
        names=tuple(names),
        sampling=sampling,
        router_id=router_id,
    )
    sequence = Sequence(request.request_id, SessionId(1), known, prompt, names, b"", sampling)
    return Answer(request, sequence, None, 16, AnswerTrace(Recorder(), request))


def grow(answer: Answer, *tokens: int, finish: FinishReason | None = None) -> None:
    answer.tokens += [SampledToken(token) for token in tokens]
    answer.finish = finish
