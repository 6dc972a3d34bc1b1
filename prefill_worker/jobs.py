"""Pulls become sequences that only build pages; the scheduler decides which start when, and in what chunks.

A pull's missing blocks that a peer holds are fetched there as soon as their pages are claimed, while other pulls are
computed. The scheduler skips sequences whose next pages are being written.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

from twostroke.base.errors import EngineLost, InvalidRequest, TransferFailed
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import PageId
from twostroke.engine.backends.facts import LoadedModel
from twostroke.kv_cache.parts import GroupKind, Part, blocks_of
from twostroke.scheduler.batching import Step
from twostroke.scheduler.sequence import Constraint, building
from twostroke.scheduler.sequence import Sequence as BuildSequence
from twostroke.scheduler.values import AdmittedSequence, Emission
from twostroke.tracing.span import Chunks
from twostroke.worker.role_host import RoleHost, first_token_due_s
from twostroke.worker.services.pages_service import RequestedBlocks, filled
from twostroke.worker.services.ready_parts import ReadyParts
from twostroke.worker.supply.remote import Ordered, Supplies
from twostroke.worker.supply.supply import SupplyListener
from twostroke.worker.worker import RoleServices


class BuildJob(SupplyListener):
    """One pull being served."""

    def __init__(
        self,
        host: RoleHost,
        wanted: RequestedBlocks,
        sequence: BuildSequence,
        on_close: Callable[[BuildSequence], None],
    ) -> None:
        self.span = host.recorder.begin("prefill", wanted.request_id, wanted.trace)
        self.span.set(wanted_pages=len(wanted.parts), tokens=len(wanted.tokens))
        self.queued = self.span.begin("queue")
        self.chunks = Chunks(self.span)
        self._host = host
        self._on_close = on_close
        self._wanted = wanted.parts
        self.parts = ReadyParts(host.pool, wanted.parts, self._page)
        self.peer = wanted.peer
        self.sequence = sequence
        self.computed: set[int] = set()
        """Missing blocks: they are computed here, except those that a peer sends."""
        self.error: Exception | None = None
        self.admitted_s: float | None = None
        """Wall-clock time of admission."""

    def admitted(self) -> None:
        self.admitted_s = time.time()
        self.queued.end(at_s=self.admitted_s)
        self.parts.change()

    def left(self, parts: Sequence[Part]) -> None:
        """Counts blocks that this worker does not have itself as computed, until they come from the peer."""
        self.computed.update(blocks_of(parts, GroupKind.FULL))

    def fail(self, error: Exception) -> None:
        """Notes that nothing more is computed for this pull."""
        self.error = error
        self.parts.change()

    def readable(self) -> list[PageId]:
        return filled(self._host.pool, self._wanted, self._page)

    def computed_of(self, blocks: Collection[int]) -> int:
        return len((self.sequence.computed_blocks if self._host.pool.others else self.computed).intersection(blocks))

    def computed_besides(self, blocks: Collection[int]) -> int:
        return len(self.sequence.computed_blocks.difference(blocks))

    def close(self) -> None:
        self.parts.close()
        self._host.scheduler.end(self.sequence)
        self._host.pulls.prune()
        self._host.loop.wake()
        self._on_close(self.sequence)
        self._end_span()

    def _page(self, part: Part) -> PageId | None:
        if self.error is not None:
            raise TransferFailed(f"block {part.block} could not be computed: {self.error}")
        page = self.sequence.page_of(part)
        if page is None and (part.block + 1) * self._host.facts.block_size <= self.sequence.computed:
            raise TransferFailed(
                f"block {part.block} is not kept in page group {part.group}, which keeps the last ones"
            )
        return page

    def _end_span(self) -> None:
        """Ends the span when the last token was computed: the time after that was the puller's."""
        self.queued.end(error="it was never admitted")
        self.chunks.end()
        self.span.set(computed_pages=len(self.computed), computed_tokens=self.chunks.tokens)
        self.span.end(
            error=None if self.error is None else f"{type(self.error).__name__}: {self.error}",
            at_s=self.chunks.ended_s or self.admitted_s,
        )


class _FurtherParts(Constraint):
    """Looks at the wanted parts of further page groups whenever a step has advanced their sequence.

    Then the sequence may hold other ones, which no change of a page reports.
    """

    def __init__(self, parts: ReadyParts, further: Sequence[Part]) -> None:
        self._parts = parts
        self._further = further

    def ran(self, sequence: BuildSequence, start: int, end: int) -> None:
        self._parts.change(self._further)

    def passed(self, sequence: BuildSequence, before: int) -> None:
        self._parts.change(self._further)


class BuildJobs(RoleServices):
    def __init__(self, host: RoleHost, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._supplies = Supplies(host, tasks)
        self._open: dict[BuildSequence, BuildJob] = {}

    def begin(self, wanted: RequestedBlocks) -> BuildJob:
        """Queues the building of all blocks. Raises InvalidRequest for what can never be built, or Overloaded."""
        host = self._host
        _check(wanted.tokens, host.facts)
        session = host.new_session()
        sequence = building(
            wanted.request_id,
            session,
            wanted.tokens,
            wanted.block_hashes,
            host.branches.constraints_of(wanted.weights),
        )
        sequence.pulled_blocks = 0 if wanted.peer is None else wanted.peer.blocks
        sequence.due_s = first_token_due_s(host)
        host.scheduler.enqueue(sequence)
        job = self._open[sequence] = BuildJob(host, wanted, sequence, self._forget)
        further = [part for part in wanted.parts if part.group is not GroupKind.FULL]
        if further:
            sequence.constraints += (_FurtherParts(job.parts, further),)
        host.loop.wake()
        return job

    def _forget(self, sequence: BuildSequence) -> None:
        del self._open[sequence]

    def admitted(self, admission: AdmittedSequence) -> None:
        """Lets suppliers bring what they hold; called before any block of the job is computed."""
        reach(Point.PREFILL_ADMITTED)
        job = self._open[admission.sequence]
        job.admitted()
        ordered = Ordered(peer=job.peer, trace=job.span, arrived=job.computed.discard)
        self._supplies.of(job.sequence, ordered, job).begin(admission.missing)

    def planning(self) -> None:
        """Decides nothing: a prefill worker computes all that is pulled."""

    def computed(self, step: Step, seconds: float) -> None:
        for chunk in step.chunks:
            job = self._open.get(chunk.sequence)
            if job is not None:  # it may have been closed meanwhile
                job.chunks.ran(chunk.start, chunk.end, seconds)

    def failed(self, sequences: list[BuildSequence], error: Exception) -> None:
        for sequence in sequences:
            self._open[sequence].fail(error)

    def lost(self, error: EngineLost) -> None:
        for job in self._open.values():
            job.fail(error)
        self._host.progress.notify()

    def preempted(self, sequence: BuildSequence) -> None:
        raise AssertionError("a build claims all its pages at admission and never grows")

    def emitted(self, emissions: list[Emission]) -> None:
        assert not emissions, "a prefill worker never samples"

    @property
    def open_requests(self) -> int:
        return 0

    def close(self) -> None:
        """Closes nothing: jobs end with their calls."""


def _check(tokens: Sequence[int], facts: LoadedModel) -> None:
    fits = facts.pages * facts.block_size
    if len(tokens) > fits:
        raise InvalidRequest(f"{len(tokens)} tokens are wanted; this pool holds {fits}", field="tokens")
    if len(tokens) > facts.max_model_len:
        raise InvalidRequest(f"{len(tokens)} tokens are wanted; the model serves {facts.max_model_len}", field="tokens")
    if max(tokens) >= facts.vocab_size:
        raise InvalidRequest(f"token ids go up to {facts.vocab_size - 1}, got {max(tokens)}", field="tokens")
