"""A request on a decode worker: its stage, the sequence that computes it, the tokens emitted so far, its spans."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field

from twostroke.errors import ServeError
from twostroke.lifetime import Instant, Lifetime
from twostroke.request import FinishReason, PromptLogprobs, Request, SampledToken
from twostroke.rpc.convert import (
    adapter_to_message,
    error_to_message,
    prompt_logprobs_to_message,
    sampling_to_message,
    tokens_to_messages,
)
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.sequence import Sequence
from twostroke.speculation.speculation import Speculation
from twostroke.tracing.parts import Chunks
from twostroke.tracing.recorder import Recorder
from twostroke.tracing.span import OpenSpan
from twostroke.worker.pulls.pull_spec import PullReport


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

    def first_token(self, steps: int) -> None:
        """Note that decoding begins, after so many steps."""
        self._decode = self.span.begin("decode")
        self._steps_before = steps - 1

    def drafted(self, speculation: Speculation) -> None:
        """Note what became of the drafted tokens of this attempt."""
        drafts = speculation.outcome
        if self._decode is not None and drafts.run:
            saved_s = drafts.saved_s - drafts.spent_s - drafts.draft_s
            self._decode.set(drafted_tokens=drafts.run, kept_tokens=drafts.kept, speculation_saved_s=saved_s)
            self._decode.set(**facts_of_drafts(speculation))

    def end(
        self, *, tokens: int, steps: int, preemptions: int, cached_tokens: int, outcome: str, error: str | None
    ) -> None:
        self._queue.end(error="it was never admitted")
        self.chunks.end()
        if self._decode is not None:
            self._decode.set(tokens=tokens, steps=steps - self._steps_before, preemptions=preemptions)
            self._decode.end()
        self.span.set(cached_tokens=cached_tokens, computed_tokens=self.chunks.tokens, outcome=outcome)
        self.span.end(error=error)


def facts_of_drafts(speculation: Speculation | None) -> dict[str, int]:
    """Return the drafted and kept tokens of an attempt by drafter, as traces and logs name them."""
    ran = {} if speculation is None else {name: each for name, each in speculation.outcomes.items() if each.run}
    drafted = {f"drafted.{name}": each.run for name, each in ran.items()}
    return drafted | {f"kept.{name}": each.kept for name, each in ran.items()}


@dataclass(slots=True, eq=False)
class RequestState:
    """The request manager owns it and alone changes it."""

    request: Request
    sequence: Sequence
    source: worker_pb2.PageSource | None
    block_size: int
    trace: RequestTrace
    peer: PeerPrefix | None = None
    """A worker that holds a prefix. The page source, or this worker without one, fetches there what it lacks."""
    forecast: worker_pb2.SourceForecast | None = None
    """When the page source will have the blocks, as its router foresaw."""
    lifetime: Lifetime = field(default_factory=Lifetime)
    stage: Stage = Stage.WAITING
    has_ended: bool = False
    tokens: list[SampledToken] = field(default_factory=list)
    """Tokens of this attempt; the first has position len(request.emitted)."""
    finish: FinishReason | None = None
    error: ServeError | None = None
    missing_blocks: int = 0
    """Full blocks that this worker lacked when the request was first admitted."""
    reused_blocks: int = 0
    """Missing blocks that came from the cache of the page source or of the peer."""
    has_windows: bool = False
    """Layers with a window keep their parts of blocks apart: a block may be computed again although its page is here,
    and needs no window part at all where a pull ends behind it. Blocks count as missing that are computed for it."""
    pulls: set[asyncio.Future[PullReport]] = field(default_factory=set)
    """Pulls that have not ended since it was admitted; those of earlier admissions may still be ending too."""
    timer: asyncio.TimerHandle | None = None
    """The timer ends the request at its deadline, and drops the state some time after its end."""

    def move_to(self, stage: Stage) -> None:
        assert stage in NEXT[self.stage], f"{self.stage.name} -> {stage.name}"
        self.stage = stage
        self.has_ended = stage in FINAL
        self.trace.moved(stage)
        if self.has_ended:
            self._end_trace()

    def _end_trace(self) -> None:
        if self.sequence.speculation is not None:
            self.trace.drafted(self.sequence.speculation)
        self.trace.end(
            tokens=len(self.tokens),
            steps=self.sequence.steps,
            preemptions=self.sequence.preemptions,
            cached_tokens=self.cached_tokens,
            outcome=type(self.error).__name__ if self.finish is None else self.finish.value,
            error=None if self.error is None else repr(self.error),
        )

    @property
    def first_position(self) -> int:
        return len(self.request.emitted)

    @property
    def end_position(self) -> int:
        """Position of the next token."""
        return self.first_position + len(self.tokens)

    def pulled(self, report: PullReport) -> None:
        if self.sequence.preemptions:
            pass  # later pulls bring back what was counted before
        elif self.has_windows:
            self.missing_blocks += report.computed + report.also_computed
        else:
            self.reused_blocks += report.pulled - report.computed
        for instant, when in ((Instant.FIRST_PAGE, report.first_page_s), (Instant.LAST_PAGE, report.last_page_s)):
            if when is not None:
                self.lifetime.merge({instant.value: when})

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was found in a cache instead of being computed for this request.

        Too few while a pull is open: only its report tells what its source has computed.
        """
        missing = self.missing_blocks - self.reused_blocks + len(self.sequence.computed_blocks)
        blocks = len(self.request.block_hashes) - missing
        if self.has_windows and self.pulls:
            blocks = min(blocks, self.sequence.hit_blocks)
        return min(max(0, blocks) * self.block_size, len(self.request.prompt))

    def entry(self, from_position: int, number: int) -> worker_pb2.TokenEntry:
        """Return the message to the router: tokens from `from_position` on, and the end if it has come.

        `number` stands for the request in the columns of later batches.
        """
        entry = worker_pb2.TokenEntry(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            number=number,
            position=from_position,
            tokens=tokens_to_messages(self.tokens[from_position - self.first_position :]),
        )
        if from_position == self.first_position or self.has_ended:
            entry.cached_tokens = self.cached_tokens
            entry.local_tokens = self.sequence.hit_blocks * self.block_size
            entry.lifetime.update(self.lifetime.as_dict())
        if self.has_ended and self.sequence.speculation is not None:
            for drafter, outcome in self.sequence.speculation.outcomes.items():
                entry.drafts[drafter].CopyFrom(worker_pb2.DraftCounts(drafted=outcome.run, kept=outcome.kept))
        if from_position == self.first_position and (prompt_logprobs := self._prompt_logprobs()) is not None:
            entry.prompt_logprobs.CopyFrom(prompt_logprobs)
        if self.finish is not None:
            entry.finish_reason = self.finish.value
        if self.error is not None:
            entry.finish_reason = FinishReason.ERROR.value
            entry.error.CopyFrom(error_to_message(self.error))
        return entry

    def detach_notice(self, error: ServeError) -> worker_pb2.TokenEntry:
        """Return the message to a router whose request another router has attached to."""
        return worker_pb2.TokenEntry(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            position=self.end_position,
            finish_reason=FinishReason.ERROR.value,
            error=error_to_message(error),
        )

    def snapshot(self) -> worker_pb2.RequestSnapshot:
        """Return all that is known of the request, for a router that recovers its stream."""
        request, reason = self.request, FinishReason.ERROR if self.error is not None else self.finish
        return worker_pb2.RequestSnapshot(
            request_id=request.request_id,
            attempt=request.attempt,
            prompt=request.prompt,
            sampling=sampling_to_message(request.sampling),
            tokens=tokens_to_messages([*request.emitted, *self.tokens]),
            finish_reason=reason.value if reason is not None else "",
            cached_tokens=self.cached_tokens,
            adapter=adapter_to_message(request.adapter),
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> worker_pb2.PromptLogprobs | None:
        """Return what goes with the first token where logprobs of the prompt are wanted."""
        if not self.request.scores_prompt or not self.tokens:
            return None
        return prompt_logprobs_to_message(PromptLogprobs.joined(self.sequence.scores))
