"""A request on a decode worker: its stage, the sequence that computes it, the tokens emitted so far, its spans."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

from twostroke.base.errors import ServeError
from twostroke.base.lifetime import Instant, Lifetime
from twostroke.kv_cache.parts import Part
from twostroke.request import Attempt, FinishReason, SampledToken
from twostroke.rpc.convert import error_to_message, request_to_message, tokens_to_messages
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.sequence import Sequence
from twostroke.tracing.recorder import Recorder
from twostroke.tracing.span import Chunks, OpenSpan
from twostroke.worker.answers import AnswerFeatures
from twostroke.worker.supply.pull_spec import PullReport
from twostroke.worker.supply.remote import Ordered
from twostroke.worker.supply.supply import Supply, SupplyListener


class Stage(enum.Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    PULLING = "pulling"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


NEXT: dict[Stage, frozenset[Stage]] = {
    Stage.WAITING: frozenset({Stage.RESERVED, Stage.FAILED}),
    Stage.RESERVED: frozenset({Stage.PULLING, Stage.RUNNING, Stage.FAILED}),  # RUNNING: nothing to pull
    Stage.PULLING: frozenset({Stage.RUNNING, Stage.WAITING, Stage.FAILED}),  # WAITING: preempted
    Stage.RUNNING: frozenset({Stage.DONE, Stage.WAITING, Stage.FAILED}),  # WAITING: preempted
    Stage.DONE: frozenset(),
    Stage.FAILED: frozenset(),
}

FINAL = frozenset({Stage.DONE, Stage.FAILED})


class RequestTrace:
    """Spans of one request, driven by its stages."""

    def __init__(self, recorder: Recorder, attempt: Attempt) -> None:
        self.span = recorder.begin("attempt", attempt.request_id, attempt.trace)
        self.span.set(attempt=attempt.number, known_tokens=attempt.known_tokens)
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

    def first_token(self, steps: int) -> None:
        """Notes that decoding begins, after this many steps."""
        self._decode = self.span.begin("decode")
        self._steps_before = steps - 1

    def end(self, state: RequestState) -> None:
        self._queue.end(error="it was never admitted")
        self.chunks.end()
        if self._decode is not None:
            sequence = state.sequence
            steps = sequence.steps - self._steps_before
            self._decode.set(tokens=len(state.tokens), steps=steps, preemptions=sequence.preemptions)
            self._decode.set(**state.features.facts)
            self._decode.end()
        outcome = type(state.error).__name__ if state.finish is None else state.finish.value
        self.span.set(cached_tokens=state.cached_tokens, computed_tokens=self.chunks.tokens, outcome=outcome)
        self.span.end(error=None if state.error is None else repr(state.error))


@dataclass(slots=True, eq=False)
class RequestState(SupplyListener):
    """The state of a request. The request manager owns it; its supply reports to it which blocks have arrived."""

    attempt: Attempt
    sequence: Sequence
    ordered: Ordered
    """The workers that its router named."""
    block_size: int
    trace: RequestTrace
    features: AnswerFeatures = field(default_factory=AnswerFeatures)
    supply: Supply | None = None
    """The suppliers of the blocks that it lacked when it was last admitted; None while it waits."""
    lifetime: Lifetime = field(default_factory=Lifetime)
    stage: Stage = Stage.WAITING
    has_ended: bool = False
    tokens: list[SampledToken] = field(default_factory=list)
    """Tokens of this attempt; the first has position len(attempt.emitted)."""
    finish: FinishReason | None = None
    error: ServeError | None = None
    missing_blocks: int = 0
    """Full blocks that this worker lacked when the request was first admitted."""
    reused_blocks: int = 0
    """Missing blocks that came from the cache of the page source or of the peer."""
    counts_computed: bool = False
    """Whether `missing_blocks` counts the blocks that are computed for the request. With several page groups, a block
    may be computed again although its page is here."""
    on_settled: Callable[[], None] = field(default=lambda: None)
    """Called when none of its pulls is under way any more."""
    timer: asyncio.TimerHandle | None = None
    """The timer ends the request at its deadline, and drops the state some time after its end."""

    def move_to(self, stage: Stage) -> None:
        assert stage in NEXT[self.stage], f"{self.stage.name} -> {stage.name}"
        self.stage = stage
        self.has_ended = stage in FINAL
        if self.supply is not None and (self.has_ended or stage is Stage.WAITING):
            self.supply.end()
        self.trace.moved(stage)
        if self.has_ended:
            self.trace.end(self)

    @property
    def first_position(self) -> int:
        return len(self.attempt.emitted)

    @property
    def end_position(self) -> int:
        """Position of the next token."""
        return self.first_position + len(self.tokens)

    def left(self, parts: ListOf[Part]) -> None:
        """Counts blocks that this worker does not have itself, at the first admission."""
        if not self.sequence.preemptions and not self.counts_computed:
            self.missing_blocks += len(parts)

    def settled(self) -> None:
        if self.stage is Stage.PULLING:
            self.move_to(Stage.RUNNING)
        self.on_settled()

    def pulled(self, report: PullReport) -> None:
        if self.sequence.preemptions:
            pass  # later pulls bring back what was counted before
        elif self.counts_computed:
            self.missing_blocks += report.computed + report.also_computed
        else:
            self.reused_blocks += report.pulled - report.computed
        for instant, when in ((Instant.FIRST_PAGE, report.first_page_s), (Instant.LAST_PAGE, report.last_page_s)):
            if when is not None:
                self.lifetime.merge({instant.value: when})

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found in a cache instead of being computed for this request.

        A lower bound while a pull is open: only the pull's report says what its source has computed.
        """
        missing = self.missing_blocks - self.reused_blocks + len(self.sequence.computed_blocks)
        blocks = len(self.attempt.block_hashes) - missing
        if self.counts_computed and self.supply is not None and self.supply.is_pulling:
            blocks = min(blocks, self.sequence.hit_blocks)
        return min(max(0, blocks) * self.block_size, len(self.attempt.request.prompt))

    def entry(self, from_position: int, number: int) -> worker_pb2.TokenEntry:
        """Returns the message to the router: tokens from `from_position` on, and the end if it has come.

        `number` stands for the request in the columns of later batches.
        """
        entry = worker_pb2.TokenEntry(
            request_id=self.attempt.request_id,
            attempt=self.attempt.number,
            number=number,
            position=from_position,
            tokens=tokens_to_messages(self.tokens[from_position - self.first_position :]),
        )
        if from_position == self.first_position or self.has_ended:
            entry.cached_tokens = self.cached_tokens
            entry.local_tokens = self.sequence.hit_blocks * self.block_size
            entry.lifetime.update(self.lifetime.as_dict())
        if from_position == self.first_position and self.tokens:
            for feature in self.features.each:
                feature.add_to_first(entry)
        if self.has_ended:
            for feature in self.features.each:
                feature.add_to_last(entry)
        if self.finish is not None:
            entry.finish_reason = self.finish.value
        if self.error is not None:
            entry.finish_reason = FinishReason.ERROR.value
            entry.error.CopyFrom(error_to_message(self.error))
        return entry

    def detach_notice(self, error: ServeError) -> worker_pb2.TokenEntry:
        """Returns the message to a router whose request another router has attached to."""
        return worker_pb2.TokenEntry(
            request_id=self.attempt.request_id,
            attempt=self.attempt.number,
            position=self.end_position,
            finish_reason=FinishReason.ERROR.value,
            error=error_to_message(error),
        )

    def snapshot(self) -> worker_pb2.RequestSnapshot:
        """Returns all that is known of the request, for a router that recovers its stream."""
        attempt, reason = self.attempt, FinishReason.ERROR if self.error is not None else self.finish
        snapshot = worker_pb2.RequestSnapshot(
            request_id=attempt.request_id,
            attempt=attempt.number,
            request=request_to_message(attempt.request),
            tokens=tokens_to_messages([*attempt.emitted, *self.tokens]),
            finish_reason=reason.value if reason is not None else "",
            cached_tokens=self.cached_tokens,
        )
        if self.tokens:
            for feature in self.features.each:
                feature.add_to_first(snapshot)
        return snapshot
