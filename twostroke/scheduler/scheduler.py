"""The scheduler chooses the tokens of each step by one rule: a token budget lets computed catch up with known.

Prefill, chunked prefill, decode, resuming after preemption or after a failed pull and local prefill are this rule with
different numbers. Admission claims all pages that a sequence needs before anything is computed for it. Growth claims
one page at a time; if none is left, the sequence admitted last releases its pages and waits again.

Every method runs on the worker's event loop. Between `plan` and `update` a step is in flight on the engine thread;
sequences that end meanwhile keep their pages until the update.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as ListOf

from twostroke.base.errors import Overloaded
from twostroke.config import ScheduleConfig
from twostroke.kv_cache.block import root_hash
from twostroke.kv_cache.parts import Part
from twostroke.kv_cache.pool import BlockPool
from twostroke.request import FinishReason
from twostroke.scheduler.batch import StepResult
from twostroke.scheduler.batching import BatchBuilder, Chunk, Step, StepBuilder
from twostroke.scheduler.branches import ClaimGate, OpenGate, SchedulerBranches
from twostroke.scheduler.choosing import ChunkChooser
from twostroke.scheduler.cost import Budget
from twostroke.scheduler.emission import Drawn, Emitted, Emitter, new_drawn
from twostroke.scheduler.running import ADMISSION_LOOKAHEAD, RunningSequences, SchedulerLoad, WaitingQueue
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import AdmittedSequence, Emission, SchedulerLimits
from twostroke.scheduler.windows.places import places_of
from twostroke.scheduler.windows.progress import progress_of


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        config: ScheduleConfig,
        limits: SchedulerLimits,
        builder: StepBuilder | None = None,
        gate: ClaimGate | None = None,
        branches: SchedulerBranches | None = None,
    ) -> None:
        """`branches` are the features that change what sequences need; by default there are none."""
        self._pool = pool
        self._config = config
        self._limits = limits
        self.step_tokens = config.step_tokens(on_gpu=limits.on_gpu)
        """Most tokens in one step; a worker may allow more once it has measured what they cost."""
        self._builder = builder or BatchBuilder(limits.block_size, pool.total, limits.eos_token_ids, places_of(pool))
        self._gate = gate or OpenGate()
        self._progress = progress_of(pool, limits.block_size, self.step_tokens, self._gate.loaded_depth)
        branches = branches or SchedulerBranches()
        self._shared = branches.shared
        self._emitter = Emitter(limits.eos_token_ids, limits.max_model_len, branches.readings)
        self._waiting = WaitingQueue()
        self._running = RunningSequences(pool, self._progress, limits.block_size)
        """Running sequences in order of admission; preemption takes from the end."""
        self._in_flight: frozenset[Sequence] = frozenset()
        self._preempted: list[Sequence] = []
        self.has_new = False
        """Whether sequences were enqueued since the last admission."""
        self._chooser = ChunkChooser(
            self._running, self._progress, limits, branches.extension, self._emitter.late, self._preempt
        )
        self.load = SchedulerLoad(self._waiting, self._running, pool, self._progress, limits.block_size)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def running_sequences(self) -> tuple[Sequence, ...]:
        """Returns the running sequences, in order of admission."""
        return tuple(self._running)

    def is_being_read(self, sequence: Sequence) -> bool:
        """Returns whether the reader of its answer still works on other threads. Until `take_late` it runs in no step,
        and its reader and proposer must not be called.
        """
        return sequence in self._emitter.late

    @property
    def waiting_sequences(self) -> tuple[Sequence, ...]:
        """Returns the waiting sequences, in their order."""
        return tuple(self._waiting)

    def enqueue(self, sequence: Sequence) -> None:
        """Lets a sequence wait for pages. Raises Overloaded if the bounded queue is full."""
        if len(self._waiting) >= self._config.max_waiting:
            raise Overloaded(f"the queue is full: {len(self._waiting)} requests are waiting for pages; retry later")
        sequence.constraints = self._shared + sequence.constraints
        self._set_pending(sequence)
        self._waiting.append(sequence)
        self.has_new = True

    def next_waiting(self) -> list[Sequence]:
        """Returns the waiting sequences that the next `admit` tries, in their order."""
        return list(itertools.islice(self._waiting, ADMISSION_LOOKAHEAD))

    def admit(self) -> list[AdmittedSequence]:
        """Claims pages for waiting sequences in order. One that fits may pass one that does not, `max_passes` times.

        A step may be in flight: it uses no page that can be claimed.
        """
        self.has_new = False
        admitted: list[AdmittedSequence] = []
        passed: list[Sequence] = []
        for _ in range(min(ADMISSION_LOOKAHEAD, len(self._waiting))):
            if len(self._running) >= self._config.max_num_seqs:
                break
            sequence = self._waiting.take_first()
            admission = self._claim(sequence)
            if admission is None:
                passed.append(sequence)
                if sequence.passes >= self._config.max_passes:
                    break
                continue
            for other in passed:
                other.passes += 1
            self._running.add(sequence)
            admitted.append(admission)
            if any(other.passes >= self._config.max_passes for other in passed):
                break
        if passed:
            self._waiting.append_first(passed)
        return admitted

    def pull_to(self, sequence: Sequence, depth: int) -> list[Part]:
        """Prepares a running sequence for a pull to the end of `depth` blocks; returns its parts without a writer."""
        if sequence not in self._running:
            return []
        self._running.touch(sequence)
        return self._progress.pull_to(sequence, depth)

    def plan(self, budget: Budget | None = None) -> Step | None:
        """Chooses the next step; None if all wait for others' pages. `budget` limits prompt tokens beside streams."""
        assert not self._in_flight, "a step is in flight"
        chunks = self._chooser.choose(budget, self.step_tokens)
        if not chunks:
            return None
        self._in_flight = frozenset([chunk.sequence for chunk in chunks])
        return self.step_of(chunks)

    def take_preempted(self) -> list[Sequence]:
        """Returns the sequences that `plan` preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def update(self, step: Step, result: StepResult) -> list[Emission]:
        """Applies the result of a step: blocks become readable, sampled tokens become known."""
        self._in_flight -= {chunk.sequence for chunk in step.chunks}
        for row, scores in zip(step.batch.scores, result.scores, strict=True):
            for constraint in step.chunks[row.row].sequence.constraints:
                constraint.scored(scores)
        for shared in self._shared:
            shared.applied(step)
        sampled = iter(result.tokens)
        drawn: list[Drawn] = []
        for sequence, start, end, samples, proposed in step.chunks:
            tokens = list(itertools.islice(sampled, 1 + len(proposed))) if samples else ()
            sequence.steps += 1
            for constraint in sequence.constraints:
                constraint.ran(sequence, start, end)
            self._advance(sequence, end)
            if sequence.ended:
                self._free(sequence)
            elif tokens:
                drawn.append(new_drawn((sequence, tokens, proposed)))
        return self._take_in(self._emitter.emit(drawn))

    def take_late(self) -> list[Emission]:
        """Returns the tokens of slow readers that have become known since the last update.

        It is called before each plan, after `admit`: until then those answers run in no step.
        """
        if not self._emitter.late:
            return []
        emitted = self._emitter.emit_late(self._running)
        for each in emitted:
            self._running.touch(each.sequence)
        return self._take_in(emitted)

    def step_of(self, chunks: ListOf[Chunk]) -> Step:
        """Returns a step of these chunks. Those of a slice of a failed step make a step of its own, too."""
        step = self._builder.build(chunks)
        for shared in self._shared:
            step = shared.added_to(step)
        return step

    def abort_step(self, step: Step) -> list[Sequence]:
        """Ends the sequences of a step, or a slice of one, that failed for good; returns those that had not ended."""
        sequences = [chunk.sequence for chunk in step.chunks]
        failed = [sequence for sequence in sequences if not sequence.ended]
        self._in_flight -= set(sequences)
        for sequence in sequences:
            if sequence.ended:
                self._free(sequence)
            else:
                self.end(sequence)
        return failed

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence in any state; its pages are released once no step uses them."""
        if sequence.ended:
            return
        sequence.ended = True
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        if sequence not in self._in_flight:
            self._free(sequence)

    # Admission

    def _set_pending(self, sequence: Sequence) -> None:
        sequence.set_pending(self._pool.hits(sequence.block_hashes), self._limits.block_size)

    def _claim(self, sequence: Sequence) -> AdmittedSequence | None:
        if not all(constraint.may_begin(sequence) for constraint in sequence.constraints):
            return None
        block_size = self._limits.block_size
        if not sequence.computes_all:
            sequence.extend_hashes(block_size)
        if self._pool.gains < sequence.claimable_at:
            return None
        wanted_tokens = len(sequence.known) + (1 if sequence.sampling else 0)
        private = -(-wanted_tokens // block_size) - len(sequence.block_hashes)
        if not self._progress.may_begin(sequence):
            return None
        if not self._gate.may_claim(sequence.session, sequence.block_hashes, private):
            return None
        claim = self._pool.claim(sequence.block_hashes, root_hash(), private)
        if claim is None:
            sequence.claimable_at = self._pool.claimable_at(sequence.block_hashes, private)
            return None
        missing = self._progress.begin(sequence, claim)
        for constraint in sequence.constraints:
            constraint.began(sequence)
        if not sequence.preemptions:
            sequence.hit_blocks = claim.hits
        return AdmittedSequence(sequence, missing)

    def _preempt(self, sequence: Sequence) -> None:
        """Releases the pages of a sequence; it keeps its known tokens and waits again, first in the queue."""
        self._running.remove(sequence)
        self._free(sequence)
        sequence.computed = sequence.claimable_at = 0
        for constraint in sequence.constraints:
            constraint.preempted(sequence)
        sequence.preemptions += 1
        self._preempted.append(sequence)
        self._set_pending(sequence)
        self._waiting.append_first([sequence])

    # Ends

    def _free(self, sequence: Sequence) -> None:
        for constraint in sequence.constraints:
            constraint.releases(sequence)
        self._progress.release(sequence)

    # Sampling

    def _take_in(self, emitted: ListOf[Emitted]) -> list[Emission]:
        """Applies emitted tokens: proposed tokens that were right count as computed, and complete answers end."""
        emissions: list[Emission] = []
        for sequence, last, proposed, right in emitted:
            if sequence.proposer is not None or right:
                tokens = [each.token.token for each in last if each.finish is not FinishReason.ERROR]
                if sequence.proposer is not None:
                    sequence.proposer.drawn(tokens, len(proposed))
            if sequence.reader is not None:
                self._chooser.became_known(sequence)
            if right:
                self._advance(sequence, len(sequence.known) - len(tokens) + right)
            if last[-1].finish is not None:
                pages = [] if last[-1].token.is_sound else list(sequence.pages)
                self.end(sequence)
                self._pool.forget(pages)  # corrupt KV in them may be why the logits are not finite
            emissions += last
        return emissions

    def _advance(self, sequence: Sequence, end: int) -> None:
        """Records that the KV of the sequence's first `end` tokens is computed."""
        self._running.touch(sequence)
        block_size = self._limits.block_size
        if end <= sequence.computed:
            return
        if end // block_size > sequence.computed // block_size:
            self._progress.make_readable(sequence, end)
        sequence.computed = end
