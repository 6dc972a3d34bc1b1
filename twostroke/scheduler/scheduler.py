"""The scheduler chooses the tokens of each step by one rule: a token budget lets computed catch up with known.

Prefill, chunked prefill, decode, resuming after preemption or after a failed pull and local prefill are this rule with
different numbers. Admission claims all pages that a sequence needs before anything is computed for it. Growth claims
one page at a time; if none is left, the sequence admitted last releases its pages and waits again.

Every method runs on the worker's event loop. Between `plan` and `update` a step is in flight on the engine thread;
sequences that end meanwhile keep their pages until the update.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import NamedTuple

from twostroke.config import ScheduleConfig
from twostroke.errors import Overloaded
from twostroke.ids import PageId
from twostroke.kv_cache.pool import BlockPool
from twostroke.request import FinishReason, SampledToken
from twostroke.scheduler.batch import StepResult
from twostroke.scheduler.batching import BatchBuilder, Chunk, Step, StepBuilder
from twostroke.scheduler.cost import Budget, Queued
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.waiting_queue import WaitingQueue

ADMISSION_LOOKAHEAD = 16
"""Waiting sequences that one admission round looks at: short ones can pass, and it is cheap enough for every step."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of the model and the role, besides the configuration."""

    block_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    align_chunks: bool
    """End chunks on block boundaries, so that every chunk finishes the blocks it began (prefill workers)."""
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class AdmittedSequence:
    """A sequence that got its pages. The `missing` blocks have no writer: pull them now, or they are computed."""

    sequence: Sequence
    missing: list[int]


class Emission(NamedTuple):
    """It is a tuple because one is made for every token."""

    sequence: Sequence
    token: SampledToken
    finish: FinishReason | None
    """Reason of the end, if it ended; ERROR means that its logits were not finite and there is no token."""


class Scheduler:
    def __init__(
        self, pool: BlockPool, config: ScheduleConfig, limits: SchedulerLimits, builder: StepBuilder | None = None
    ) -> None:
        self._pool = pool
        self._config = config
        self._limits = limits
        self.step_tokens = config.step_tokens(on_gpu=limits.on_gpu)
        self._builder = builder or BatchBuilder(limits.block_size, pool.total, limits.eos_token_ids)
        self._waiting = WaitingQueue()
        self._running: dict[Sequence, None] = {}
        """Running sequences in order of admission; preemption takes from the end."""
        self._in_flight: frozenset[Sequence] = frozenset()
        self._preempted: list[Sequence] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def prompts(self) -> int:
        """Sequences that wait for their first token, or for their pages where nothing is sampled."""
        return len(self._waiting) + sum(not sequence.answer_tokens for sequence in self._running)

    def lone_streams(self) -> tuple[int, int] | None:
        """Return the streams and the tokens that they attend to, or None if the next step may run anything else."""
        streams = context_tokens = 0
        for sequence in self._running:
            self._catch_up(sequence)
            first = sequence.first_query
            if sequence.answer_tokens and len(sequence.known) - first <= 1:
                streams += 1
                context_tokens += len(sequence.known)
            elif self._runnable_end(sequence, self._limits.block_size) > first:
                return None
        return (streams, context_tokens) if streams else None

    @property
    def queued_tokens(self) -> int:
        """Tokens known but not computed, without those that a pull is writing; equal blocks count once."""
        return self.queued().all_tokens

    def queued(self) -> Queued:
        """Sum up the queued work. Called after every step, so its cost does not depend on prompt lengths."""
        block_size = self._limits.block_size
        unwritten = self._pool.unwritten
        tokens = self._waiting.pending_tokens + unwritten.blocks * block_size
        pairs = self._waiting.pending_pairs + (unwritten.depths + unwritten.blocks / 2) * block_size**2
        streams = stream_tokens = context_tokens = 0
        for sequence in self._running:
            known, computed, hashed = len(sequence.known), sequence.computed, len(sequence.block_hashes) * block_size
            begun = self._begun_tokens(sequence) if computed < hashed else 0
            tail = known - max(computed, hashed)
            if known - computed <= 1:
                streams += 1
                stream_tokens += begun + tail
                context_tokens += known
            else:
                tokens += begun + tail
                pairs += begun * (computed + begun / 2) + tail * (known - tail / 2)
        return Queued(tokens, pairs, streams, context_tokens, stream_tokens)

    def enqueue(self, sequence: Sequence) -> None:
        """Let a sequence wait for pages. Raises Overloaded if the bounded queue is full."""
        if len(self._waiting) >= self._config.max_waiting:
            raise Overloaded(f"the queue is full: {len(self._waiting)} requests are waiting for pages; retry later")
        self._wait(sequence)
        self._waiting.append(sequence)

    def admit(self) -> list[AdmittedSequence]:
        """Claim pages for waiting sequences, in their order.

        A later one that fits may pass one that does not, at most `max_passes` times.
        """
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
            self._running[sequence] = None
            admitted.append(admission)
            if any(other.passes >= self._config.max_passes for other in passed):
                break
        self._waiting.append_first(passed)
        return admitted

    def plan(self, budget: Budget | None = None) -> Step | None:
        """Choose the next step, or None if every sequence waits for pages that others write.

        `budget` limits the prompt tokens that run beside streams.
        """
        assert not self._in_flight, "a step is in flight"
        for sequence in self._running:
            if self._is_hashed_next(sequence):
                self._catch_up(sequence)
        chunks = self._choose(budget)
        if not chunks:
            return None
        self._in_flight = frozenset(chunk.sequence for chunk in chunks)
        return self._builder.build(chunks)

    def take_preempted(self) -> list[Sequence]:
        """Return the sequences that `plan` preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def update(self, step: Step, result: StepResult) -> list[Emission]:
        """Apply the result of a step: blocks become readable, sampled tokens become known."""
        self._in_flight -= {chunk.sequence for chunk in step.chunks}
        sampled = iter(result.tokens)
        emissions: list[Emission] = []
        for chunk in step.chunks:
            token = next(sampled) if chunk.samples else None
            chunk.sequence.steps += 1
            self._computed(chunk.sequence, chunk.end)
            if chunk.sequence.ended:
                self._free(chunk.sequence)
            elif token is not None:
                emissions.append(self._emit(chunk.sequence, token) if token.is_sound else self._fail(chunk.sequence))
        return emissions

    def part(self, chunks: ListOf[Chunk]) -> Step:
        """Return a step of these chunks of the failed step in flight; it is updated or aborted like a whole step."""
        return self._builder.build(chunks)

    def abort_step(self, step: Step) -> list[Sequence]:
        """End the sequences of a step, or a part of one, that failed for good; return those that had not ended."""
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
        """End a sequence in any state; its pages are released once no step uses them."""
        if sequence.ended:
            return
        sequence.ended = True
        if sequence in self._running:
            del self._running[sequence]
        else:
            self._waiting.remove(sequence)
        if sequence not in self._in_flight:
            self._free(sequence)

    # Admission

    def _wait(self, sequence: Sequence) -> None:
        sequence.set_pending(self._pool.hits(sequence.block_hashes), self._limits.block_size)

    def _claim(self, sequence: Sequence) -> AdmittedSequence | None:
        block_size = self._limits.block_size
        sequence.extend_hashes(block_size)
        wanted_tokens = len(sequence.known) + (1 if sequence.sampling else 0)
        private = -(-wanted_tokens // block_size) - len(sequence.block_hashes)
        claim = self._pool.claim(sequence.block_hashes, sequence.root, private)
        if claim is None:
            return None
        sequence.pages = claim.pages
        sequence.computed = claim.hits * block_size
        if not sequence.preemptions:
            sequence.hit_blocks = claim.hits
        return AdmittedSequence(sequence, claim.missing)

    # Choosing

    def _choose(self, budget: Budget | None) -> list[Chunk]:
        """Choose all sequences that need one token, then ends of prompts, then the rest in order of admission."""
        block_size, left = self._limits.block_size, self.step_tokens
        chunks: list[Chunk] = []
        for is_stream, sequence in self._by_urgency():
            if sequence not in self._running:
                continue  # preempted by an earlier one
            if left <= 0:
                break
            if budget is not None and not is_stream:
                left, budget = min(left, _beside(chunks, budget, sequence.first_query)), None
            start, known = sequence.first_query, len(sequence.known)
            end, is_hashed = min(start + left, known), self._is_hashed_next(sequence)
            if is_hashed:
                end = self._runnable_end(sequence, end)
            if end < known:
                end = self._align(end)
            if end <= start or (len(sequence.pages) * block_size < end and not self._grow(sequence, end)):
                continue
            left -= end - start
            chunk = Chunk(sequence, start, end, sequence.sampling is not None and end == known)
            chunks.append(chunk)
            if is_hashed:
                self._become_writer(chunk)
        return chunks

    def _by_urgency(self) -> list[tuple[bool, Sequence]]:
        """Return running sequences: streams, which need one token, before those that need less than a block (as after
        a pull: cheap, and output begins), before the others."""
        streams: list[tuple[bool, Sequence]] = []
        tails: list[tuple[bool, Sequence]] = []
        others: list[tuple[bool, Sequence]] = []
        for sequence in self._running:
            tokens = len(sequence.known) - sequence.computed
            if tokens <= 1:
                streams.append((True, sequence))
            else:
                (tails if tokens < self._limits.block_size else others).append((False, sequence))
        return streams + tails + others

    def _is_hashed_next(self, sequence: Sequence) -> bool:
        """Tell whether its next token lies in a block with a hash: others may fill it, or wait for it."""
        return sequence.computed // self._limits.block_size < len(sequence.block_hashes)

    def _runnable_end(self, sequence: Sequence, end: int) -> int:
        """Return `end`, or an earlier one before a block that is filled or written by another."""
        block_size = self._limits.block_size
        for block in range(sequence.computed // block_size, min(-(-end // block_size), len(sequence.block_hashes))):
            if self._is_others_work(sequence, sequence.pages[block]):
                return block * block_size
        return end

    def _is_others_work(self, sequence: Sequence, page: PageId) -> bool:
        return self._pool.is_filled(page) or self._pool.writer(page) not in (None, sequence.session)

    def _begun_tokens(self, sequence: Sequence) -> int:
        """Return the uncomputed tokens of the blocks that a running sequence is writing."""
        block_size = self._limits.block_size
        block = sequence.computed // block_size
        while block < len(sequence.block_hashes) and self._pool.writer(sequence.pages[block]) == sequence.session:
            block += 1
        return max(0, block * block_size - sequence.computed)

    def _align(self, end: int) -> int:
        """Cut `end` back to a block boundary, unless steps are smaller than a block."""
        block_size = self._limits.block_size
        too_small = self.step_tokens < block_size
        return end - end % block_size if self._limits.align_chunks and not too_small else end

    def _grow(self, sequence: Sequence, end: int) -> bool:
        """Claim pages up to `end`; preempt the sequence admitted last until that works, even `sequence` itself.

        Only sequences that need one token grow. They are chosen in order of admission, so the victim has not been
        chosen yet.
        """
        while len(sequence.pages) * self._limits.block_size < end:
            page = self._pool.claim_private()
            if page is not None:
                sequence.pages.append(page)
                continue
            victim = next(reversed(self._running))
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Release the pages of a sequence; it keeps its known tokens and waits again, first in the queue."""
        del self._running[sequence]
        self._free(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self._preempted.append(sequence)
        self._wait(sequence)
        self._waiting.append_first([sequence])

    # Writing and catching up

    def _become_writer(self, chunk: Chunk) -> None:
        for page in self._pages_of(chunk.sequence, chunk.start, chunk.end):
            if self._pool.is_arriving(page) and self._pool.writer(page) is None:
                self._pool.assign_writer(page, chunk.sequence.session)

    def _pages_of(self, sequence: Sequence, start: int, end: int) -> Iterable[PageId]:
        return sequence.pages[start // self._limits.block_size : -(-end // self._limits.block_size)]

    def _catch_up(self, sequence: Sequence) -> None:
        """Advance `computed` over blocks that others have filled."""
        block_size = self._limits.block_size
        block = sequence.computed // block_size
        while block < len(sequence.block_hashes) and self._pool.is_filled(sequence.pages[block]):
            block += 1
            sequence.computed = block * block_size

    def _computed(self, sequence: Sequence, end: int) -> None:
        """Make blocks readable that the forward pass completed."""
        first, last = sequence.computed // self._limits.block_size, end // self._limits.block_size
        if first < last:
            sequence.extend_hashes(self._limits.block_size)
        for block in range(first, last):
            page = sequence.pages[block]
            if self._pool.is_arriving(page):
                self._pool.fill(page)
            elif not self._pool.is_filled(page):
                self._pool.register_private(page, sequence.block_hashes[block], sequence.parent_of(block))
        sequence.computed = max(sequence.computed, end)

    def _free(self, sequence: Sequence) -> None:
        for page in sequence.pages:
            if self._pool.writer(page) == sequence.session:
                self._pool.clear_writer(page)
        self._pool.release(sequence.pages)
        sequence.pages = []

    # Sampling

    def _fail(self, sequence: Sequence) -> Emission:
        """End a sequence whose logits are not finite, and remove its blocks from the prefix cache."""
        pages = list(sequence.pages)
        self.end(sequence)
        self._pool.forget(pages)
        return Emission(sequence, SampledToken(0, is_sound=False), FinishReason.ERROR)

    def _emit(self, sequence: Sequence, token: SampledToken) -> Emission:
        sequence.known.append(token.token)
        finish = self._finish_reason(sequence, token.token)
        if finish is not None:
            self.end(sequence)
        return Emission(sequence, token, finish)

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.sampling
        assert params is not None
        if token in params.stop_token_ids or (token in self._limits.eos_token_ids and not params.ignore_eos):
            return FinishReason.STOP
        if sequence.answer_tokens >= params.max_tokens or len(sequence.known) >= self._limits.max_model_len:
            return FinishReason.LENGTH
        return None


def _beside(chunks: ListOf[Chunk], budget: Budget, prompt_context_tokens: int) -> int:
    """Return how many prompt tokens, after `prompt_context_tokens`, may run beside the streams among `chunks`."""
    contexts = [chunk.end for chunk in chunks if chunk.samples]
    return budget.prompt_tokens(len(contexts), sum(contexts), prompt_context_tokens) if contexts else sys.maxsize
