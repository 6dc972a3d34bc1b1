"""The spans of one answer on a decode worker, told by the stages that it goes through."""

from __future__ import annotations

from decode_worker.stage import FINAL, Stage
from twostroke.request import Request
from twostroke.tracing.parts import Chunks
from twostroke.tracing.recorder import Recorder
from twostroke.tracing.span import OpenSpan


class AnswerTrace:
    def __init__(self, recorder: Recorder, request: Request) -> None:
        self.span = recorder.begin("attempt", request.request_id, request.trace)
        self.span.set(attempt=request.attempt, known_tokens=len(request.prompt) + len(request.emitted))
        self.chunks = Chunks(self.span)
        self._queue = self.span.begin("queue")
        self._decode: OpenSpan | None = None
        self._steps_before = 0

    def moved(self, stage: Stage) -> None:
        if stage is Stage.WAITING:
            self.span.event("preempted")
            self._queue = self.span.begin("queue")
        elif stage not in FINAL:
            self._queue.end()

    def emitted(self, steps: int) -> None:
        """A token, in so many steps; decoding begins with the first."""
        if self._decode is None:
            self._decode = self.span.begin("decode")
            self._steps_before = steps - 1

    def end(
        self, *, tokens: int, steps: int, preemptions: int, cached_tokens: int, outcome: str, error: str | None
    ) -> None:
        self._queue.end(error="it was never its turn")
        self.chunks.end()
        if self._decode is not None:
            self._decode.set(tokens=tokens, steps=steps - self._steps_before, preemptions=preemptions)
            self._decode.end()
        self.span.set(cached_tokens=cached_tokens, computed_tokens=self.chunks.tokens, outcome=outcome)
        self.span.end(error=error)
