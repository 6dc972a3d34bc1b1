"""One answer: a request, the sequence that computes it, and what has been emitted so far."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from decode_worker.answer_trace import AnswerTrace
from decode_worker.stage import FINAL, NEXT, Stage
from twostroke.errors import ServeError
from twostroke.lifetime import Instant, Lifetime
from twostroke.request import FinishReason, Request, SampledToken
from twostroke.rpc.convert import error_to_message, sampling_to_message, tokens_to_messages
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.schedule.sequence import Sequence
from twostroke.worker.pull_client import PullReport


@dataclass(slots=True, eq=False)
class Answer:
    """Owned by the book, which alone changes it."""

    request: Request
    sequence: Sequence
    source: worker_pb2.PageSource | None
    block_size: int
    trace: AnswerTrace
    peer: PeerPrefix | None = None
    """Whoever computes the prompt fetches there what it lacks: the source, or this worker where there is none."""
    lifetime: Lifetime = field(default_factory=Lifetime)
    stage: Stage = Stage.WAITING
    tokens: list[SampledToken] = field(default_factory=list)
    """Emitted in this attempt; the first has position len(request.emitted)."""
    finish: FinishReason | None = None
    error: ServeError | None = None
    missing_blocks: int = 0
    """Named blocks that were nowhere on this worker when the request was first admitted."""
    reused_blocks: int = 0
    """Of these, blocks that came from the cache of the page source or of the peer."""
    pull: asyncio.Task[PullReport] | None = None
    """The latest; those of earlier admissions may still be ending."""
    timer: asyncio.TimerHandle | None = None
    """Ends it at its deadline; once it has ended, forgets it when its router has had time to fetch the end."""

    def move_to(self, stage: Stage) -> None:
        assert stage in NEXT[self.stage], f"{self.stage.name} -> {stage.name}"
        self.stage = stage
        self.trace.moved(stage)
        if self.has_ended:
            self._end_trace()

    def _end_trace(self) -> None:
        self.trace.end(
            tokens=len(self.tokens),
            steps=self.sequence.steps,
            preemptions=self.sequence.preemptions,
            cached_tokens=self.cached_tokens,
            outcome=type(self.error).__name__ if self.finish is None else self.finish.value,
            error=None if self.error is None else repr(self.error),
        )

    @property
    def has_ended(self) -> bool:
        return self.stage in FINAL

    @property
    def first_position(self) -> int:
        return len(self.request.emitted)

    @property
    def end_position(self) -> int:
        """Of the next token, should there be one."""
        return self.first_position + len(self.tokens)

    def pulled(self, report: PullReport) -> None:
        if not self.sequence.preemptions:  # later pulls bring back what was counted before
            self.reused_blocks += report.pulled - report.computed
        for instant, when in ((Instant.FIRST_PAGE, report.first_page_s), (Instant.LAST_PAGE, report.last_page_s)):
            if when is not None:
                self.lifetime.merge({instant.value: when})

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found somewhere instead of being computed for this request."""
        blocks = len(self.request.names) - self.missing_blocks + self.reused_blocks
        return min(blocks * self.block_size, len(self.request.prompt))

    def entry(self, from_position: int) -> worker_pb2.TokenEntry:
        """What the router is told: tokens from `from_position` on, and the end if it has come."""
        entry = worker_pb2.TokenEntry(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            position=from_position,
            tokens=tokens_to_messages(self.tokens[from_position - self.first_position :]),
        )
        if from_position == self.first_position or self.has_ended:
            entry.cached_tokens = self.cached_tokens
            entry.local_tokens = self.sequence.hit_blocks * self.block_size
            entry.lifetime.update(self.lifetime.as_dict())
        if self.finish is not None:
            entry.finish_reason = self.finish.value
        if self.error is not None:
            entry.finish_reason = FinishReason.ERROR.value
            entry.error.CopyFrom(error_to_message(self.error))
        return entry

    def farewell(self, error: ServeError) -> worker_pb2.TokenEntry:
        """For a router from which it is taken."""
        return worker_pb2.TokenEntry(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            position=self.end_position,
            finish_reason=FinishReason.ERROR.value,
            error=error_to_message(error),
        )

    def found(self) -> worker_pb2.FoundAnswer:
        """All that is known of it, for a router that is to go on with it."""
        request, reason = self.request, FinishReason.ERROR if self.error is not None else self.finish
        return worker_pb2.FoundAnswer(
            request_id=request.request_id,
            attempt=request.attempt,
            prompt=request.prompt,
            sampling=sampling_to_message(request.sampling),
            tokens=tokens_to_messages([*request.emitted, *self.tokens]),
            finish_reason=reason.value if reason is not None else "",
            cached_tokens=self.cached_tokens,
        )
