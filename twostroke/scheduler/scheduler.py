"""The scheduler chooses the tokens of each step by one rule: a token budget lets computed catch up with known.

Prefill, chunked prefill, decode, resuming after preemption or after a failed pull and local prefill are this rule with
different numbers. Admission claims all pages that a sequence needs before anything is computed for it. Growth claims
one page at a time; if none is left, the sequence admitted last releases its pages and waits again.

Every method runs on the worker's event loop. Between `plan` and `update` a step is in flight on the engine thread;
sequences that end meanwhile keep their pages until the update.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import replace

from twostroke.config import ScheduleConfig
from twostroke.errors import Overloaded
from twostroke.grammar.advance import Advancer, InlineAdvancer
from twostroke.ids import PageId
from twostroke.kv_cache.pool import BlockPool
from twostroke.request import FinishReason
from twostroke.scheduler.batch import MOST_EXTRA_LOGITS, StepResult
from twostroke.scheduler.batching import BatchBuilder, Chunk, Step, StepBuilder
from twostroke.scheduler.cost import SCORED_WEIGHT, Budget, Queued
from twostroke.scheduler.drafting import Drafting
from twostroke.scheduler.emission import Drawn, Emitted, Emitter
from twostroke.scheduler.gates import AdapterGate, ClaimGate, NoAdapters, OpenGate
from twostroke.scheduler.lateness import DuePrompt
from twostroke.scheduler.progress import BlockProgress, PageProgress
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import AdmittedSequence, Emission, SchedulerLimits
from twostroke.scheduler.waiting_queue import WaitingQueue
from twostroke.scheduler.window_progress import WindowProgress

ADMISSION_LOOKAHEAD = 16
"""Waiting sequences that one admission round looks at: short ones can pass, and it is cheap enough for every step."""


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        config: ScheduleConfig,
        limits: SchedulerLimits,
        builder: StepBuilder | None = None,
        gate: ClaimGate | None = None,
        adapters: AdapterGate | None = None,
        advancer: Advancer | None = None,
    ) -> None:
        """`advancer` lets the grammars of answers go on."""
        self._pool = pool
        self._config = config
        self._limits = limits
        self.step_tokens = config.step_tokens(on_gpu=limits.on_gpu)
        """Most tokens in one step; a worker may allow more once it has measured what they cost."""
        window = None if pool.windows is None else pool.windows.shape
        self._builder = builder or BatchBuilder(limits.block_size, pool.total, limits.eos_token_ids, window)
        self._gate = gate or OpenGate()
        self._progress = _progress_of(pool, limits.block_size, self.step_tokens, self._gate)
        self._drafting = Drafting(self._progress, limits)
        self._adapters = adapters or NoAdapters()
        self._emitter = Emitter(limits.eos_token_ids, limits.max_model_len, advancer or InlineAdvancer())
        self._waiting = WaitingQueue()
        self._released: dict[PageId, None] = {}
        """Pages whose exact blocks steps let go of, until one that was told so has not failed: at first, of all that
        ran before, as calibrations do."""
        if limits.has_exact_blocks:
            self._released = dict.fromkeys(map(PageId, range(pool.total)))
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
    def running_sequences(self) -> tuple[Sequence, ...]:
        """Return the running sequences, in order of admission."""
        return tuple(self._running)

    @property
    def prompts(self) -> int:
        """Sequences that wait for their first token, or for their pages where nothing is sampled."""
        return len(self._waiting) + sum([len(each.known) <= each.prompt_tokens for each in self._running])

    def due_prompts(self) -> Iterator[DuePrompt]:
        """Yield the prompts that are computed here, about in that order.

        It leaves out those far back in the queue: it is called before every step.
        """
        for sequence in self._running:
            start, known = sequence.computed, len(sequence.known)
            if start < known <= sequence.prompt_tokens and self._progress.runnable_end(sequence, start + 1) > start:
                tokens = known - start
                yield DuePrompt(tokens, tokens * (start + tokens / 2), sequence.due_s)
        for sequence in itertools.islice(self._waiting, ADMISSION_LOOKAHEAD):
            yield DuePrompt(sequence.pending_tokens, sequence.pending_pairs, sequence.due_s)

    def lone_streams(self) -> tuple[int, int] | None:
        """Return the streams and the tokens that they attend to, or None if the next step may run anything else."""
        streams = context_tokens = 0
        for sequence in self._running:
            self._catch_up(sequence)
            first = self._first_query(sequence)
            if sequence.answer_tokens and len(sequence.known) - first <= 1:
                streams += 1
                context_tokens += len(sequence.known)
            elif self._progress.runnable_end(sequence, len(sequence.known)) > first:
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
            begun, tail = 0, known - computed
            if computed < hashed:
                begun, tail = self._begun_tokens(sequence) + self._progress.again_tokens(sequence), known - hashed
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

    def next_waiting(self) -> list[Sequence]:
        """Return the waiting sequences that the next `admit` looks at, in their order."""
        return list(itertools.islice(self._waiting, ADMISSION_LOOKAHEAD))

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

    def pull_to(self, sequence: Sequence, depth: int) -> list[int]:
        """Prepare a running sequence for another pull, which ends after `depth` blocks.

        Returns the blocks whose window parts the pull is to bring too; none where pages hold what all layers keep.
        """
        return self._progress.pull_to(sequence, depth) if sequence in self._running else []

    def plan(self, budget: Budget | None = None) -> Step | None:
        """Choose the next step, or None if every sequence waits for pages that others write.

        `budget` limits the prompt tokens that run beside streams.
        """
        assert not self._in_flight, "a step is in flight"
        chunks = self._choose(budget)
        if not chunks:
            return None
        self._in_flight = frozenset([chunk.sequence for chunk in chunks])
        return self._step_of(chunks)

    def waiting_for(self, adapter: bytes) -> list[Sequence]:
        """Return the waiting sequences with the adapter of this digest."""
        return [each for each in self._waiting if each.adapter is not None and each.adapter.digest == adapter]

    def take_preempted(self) -> list[Sequence]:
        """Return the sequences that `plan` preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def update(self, step: Step, result: StepResult) -> list[Emission]:
        """Apply the result of a step: blocks become readable, sampled tokens become known."""
        self._in_flight -= {chunk.sequence for chunk in step.chunks}
        for row, scores in zip(step.batch.scores, result.scores, strict=True):
            step.chunks[row.row].sequence.scores.append(scores)
        for page in step.batch.released:
            self._released.pop(PageId(page), None)
        block_size, sampled = self._limits.block_size, iter(result.tokens)
        drawn: list[Drawn] = []
        for sequence, start, end, samples, drafts in step.chunks:
            tokens = list(itertools.islice(sampled, 1 + len(drafts))) if samples else ()
            sequence.steps += 1
            if self._limits.has_exact_blocks:
                self._released.update(dict.fromkeys(sequence.pages[start // block_size : end // block_size]))
            self._advance(sequence, end)
            if sequence.ended:
                self._free(sequence)
            elif tokens:
                drawn.append(Drawn(sequence, tokens, drafts))
        return self._take_in(self._emitter.emit(drawn))

    def take_late(self) -> list[Emission]:
        """Return the tokens that have become known since the last update, where grammars took long to go on.

        It is called before each plan, after `admit`: until then those answers run in no step.
        """
        return self._take_in(self._emitter.emit_late(self._running))

    def part(self, chunks: ListOf[Chunk]) -> Step:
        """Return a step of these chunks of the failed step in flight; it is updated or aborted like a whole step."""
        return self._step_of(chunks)

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
        if sequence.adapter is not None and not self._adapters.is_loaded(sequence.adapter):
            return None
        block_size = self._limits.block_size
        if not sequence.needs_scores:
            sequence.extend_hashes(block_size)
        wanted_tokens = len(sequence.known) + (1 if sequence.sampling else 0)
        private = -(-wanted_tokens // block_size) - len(sequence.block_hashes)
        if not self._progress.may_begin(sequence):
            return None
        if not self._gate.may_claim(sequence.session, sequence.block_hashes, private):
            return None
        claim = self._pool.claim(sequence.block_hashes, sequence.root, private)
        if claim is None:
            return None
        missing_windows = self._progress.begin(sequence, claim)
        self._adapters.hold(sequence)
        if not sequence.preemptions:
            sequence.hit_blocks = claim.hits
        return AdmittedSequence(sequence, claim.missing, tuple(missing_windows))

    # Choosing

    def _choose(self, budget: Budget | None) -> list[Chunk]:
        """Choose all sequences that need one token, then ends of prompts, then the rest in order of admission."""
        self._grow_forced()
        streams, others = self._by_urgency()
        chunks = self._choose_streams(streams)
        cost = None if budget is None else budget.cost
        left, left_scored = self.step_tokens - len(chunks), MOST_EXTRA_LOGITS
        for sequence in others:
            if sequence not in self._running:
                continue  # preempted by a stream
            if left <= 0:
                break
            start, known = self._first_query(sequence), len(sequence.known)
            if budget is not None and known - start > 1 and not self._is_forced_run(sequence, start):
                left, budget = min(left, _beside(chunks, budget, start)), None
            weight = SCORED_WEIGHT if sequence.needs_scores else 1
            room = min(-(-left // weight), left_scored) if sequence.needs_scores else left
            most = known if start < sequence.computed else start + room  # a block that runs again is not cut
            end = self._progress.runnable_end(sequence, min(most, known))
            if end < known and not sequence.needs_scores:
                end = self._align(end)
            end = self._progress.take(sequence, start, end)
            if end > start:
                left -= weight * (end - start)
                left_scored -= end - start if sequence.needs_scores else 0
                chunks.append(Chunk(sequence, start, end, sequence.sampling is not None and end == known))
                self._progress.begin_writing(sequence, start, end)
        room = min(left_scored, self.step_tokens - sum([chunk.end - chunk.start for chunk in chunks]))
        return chunks if cost is None else self._drafting.with_drafts(chunks, cost, room)

    def _choose_streams(self, streams: ListOf[Sequence]) -> list[Chunk]:
        """Choose sequences that run one token and draw the next, in order of admission."""
        block_size = self._limits.block_size
        chunks: list[Chunk] = []
        for sequence in streams:
            known = len(sequence.known)
            if len(sequence.pages) * block_size < known and not self._grow(sequence):
                continue
            if known == sequence.prompt_tokens:  # of a prompt that was scored, the last block may have pages alone
                self._progress.take(sequence, known - 1, known)
            chunks.append(Chunk(sequence, known - 1, known, True))
            if len(chunks) >= self.step_tokens:
                break
        return chunks

    def _by_urgency(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the running sequences that need one token, which goes to a page of their own, and the others.

        Of the others, those that need one token come first, and those that need less than a block, or run their last
        one again, are next (as after a pull: cheap, and output begins).
        """
        block_size = self._limits.block_size
        streams: list[Sequence] = []
        singles: list[Sequence] = []
        tails: list[Sequence] = []
        others: list[Sequence] = []
        for sequence in self._running:
            if self._emitter.is_late(sequence):
                continue
            is_hashed = sequence.computed // block_size < len(sequence.block_hashes)
            if is_hashed:
                self._catch_up(sequence)
                is_hashed = sequence.computed // block_size < len(sequence.block_hashes)
            tokens = len(sequence.known) - self._first_query(sequence)
            if tokens <= 1 and not is_hashed and sequence.sampling is not None:
                streams.append(sequence)
            else:
                is_tail = tokens < block_size or sequence.computed == len(sequence.known)
                (singles if tokens <= 1 else tails if is_tail else others).append(sequence)
        return streams, singles + tails + others

    def _catch_up(self, sequence: Sequence) -> None:
        """Let a sequence pass over what others have filled, and let go of the block in whose midst it was."""
        before, block_size = sequence.computed, self._limits.block_size
        self._progress.catch_up(sequence)
        if self._limits.has_exact_blocks and before % block_size and sequence.computed > before:
            self._released[sequence.pages[before // block_size]] = None

    def _first_query(self, sequence: Sequence) -> int:
        """Return the start of its next forward pass, which sees its own block exact where that is asked for."""
        first = sequence.first_query
        is_again = self._limits.has_exact_blocks and first < sequence.computed
        return first // self._limits.block_size * self._limits.block_size if is_again else first

    def _has_other_writer(self, sequence: Sequence, page: PageId) -> bool:
        return self._pool.writer(page) not in (None, sequence.session)

    def _begun_tokens(self, sequence: Sequence) -> int:
        """Return the uncomputed tokens of the blocks that a running sequence is writing."""
        block_size = self._limits.block_size
        block = sequence.computed // block_size
        while block < len(sequence.block_hashes) and self._pool.writer(sequence.pages[block]) == sequence.session:
            block += 1
        return max(0, block * block_size - sequence.computed)

    def _align(self, end: int) -> int:
        """Cut `end` back to a block boundary, unless steps are smaller than a block.

        A prompt whose tokens are scored is not cut so: its share of a step may be smaller than a block, and nobody
        reads its blocks before the prompt is done.
        """
        block_size = self._limits.block_size
        too_small = self.step_tokens < block_size
        return end - end % block_size if self._limits.align_chunks and not too_small else end

    def _grow_forced(self) -> None:
        """Claim the pages of tokens that grammars have forced: they became known without a step of their own."""
        block_size = self._limits.block_size
        for sequence in [each for each in self._running if each.grammar is not None]:
            while len(sequence.pages) * block_size < len(sequence.known) and self._grow(sequence):
                pass

    def _is_forced_run(self, sequence: Sequence, start: int) -> bool:
        """Tell whether a stream runs tokens that its grammar has forced: it goes on beside others as streams do."""
        is_answer = sequence.grammar is not None and start >= sequence.prompt_tokens
        return is_answer and len(sequence.known) - start <= self._limits.block_size

    def _grow(self, sequence: Sequence) -> bool:
        """Claim a page; preempt the sequence admitted last until that works, even `sequence` itself.

        Only streams grow, before all others are chosen and in order of admission: the victim has not been chosen yet.
        """
        while sequence in self._running:
            if self._progress.grow(sequence):
                return True
            self._preempt(next(reversed(self._running)))
        return False

    def _preempt(self, sequence: Sequence) -> None:
        """Release the pages of a sequence; it keeps its known tokens and waits again, first in the queue."""
        del self._running[sequence]
        self._free(sequence)
        sequence.computed = 0
        if sequence.needs_scores:
            sequence.scores.clear()
            sequence.block_hashes.clear()
        sequence.preemptions += 1
        self._preempted.append(sequence)
        self._wait(sequence)
        self._waiting.append_first([sequence])

    # Steps and their ends

    def _step_of(self, chunks: ListOf[Chunk]) -> Step:
        step = self._builder.build(chunks)
        if not self._released:
            return step
        return replace(step, batch=replace(step.batch, released=tuple(self._released)))

    def _free(self, sequence: Sequence) -> None:
        if self._limits.has_exact_blocks:
            self._released.update(dict.fromkeys(self._unfinished(sequence)))
        self._progress.release(sequence)
        self._adapters.release(sequence)

    def _unfinished(self, sequence: Sequence) -> Iterator[PageId]:
        """Yield the pages of which the sequence may have left exact blocks, but none that another is computing."""
        first, windows = sequence.first_query // self._limits.block_size, self._pool.windows
        for block, page in enumerate(sequence.pages[first:], first):
            part_writer = None
            if windows is not None and block < len(sequence.block_hashes):
                part_writer = windows.writer_of(sequence.block_hashes[block])
            if part_writer in (None, sequence.session) and not self._has_other_writer(sequence, page):
                yield page

    # Sampling

    def _take_in(self, emitted: ListOf[Emitted]) -> list[Emission]:
        """Apply what became known: drafted tokens that were right are computed, and answers end."""
        emissions: list[Emission] = []
        for sequence, last, drafts, equal_drafts in emitted:
            tokens = [each.token.token for each in last if each.finish is not FinishReason.ERROR]
            if sequence.speculation is not None:
                sequence.speculation.drawn(tokens, len(drafts))
            if equal_drafts:
                self._advance(sequence, len(sequence.known) - len(tokens) + equal_drafts)
            if last[-1].finish is not None:
                pages = [] if last[-1].token.is_sound else list(sequence.pages)
                self.end(sequence)
                self._pool.forget(pages)  # they may be why its logits are not finite: no cached block may be one
            emissions += last
        return emissions

    def _advance(self, sequence: Sequence, end: int) -> None:
        """Take in that the KV of its first `end` tokens has been computed."""
        block_size = self._limits.block_size
        if end <= sequence.computed:
            return
        if end // block_size > sequence.computed // block_size:
            self._progress.make_readable(sequence, end)
        sequence.computed = end
        sequence.needs_scores &= end < sequence.prompt_tokens - 1


def _progress_of(pool: BlockPool, block_size: int, step_tokens: int, gate: ClaimGate) -> BlockProgress:
    if pool.windows is None:
        return PageProgress(pool, block_size)
    return WindowProgress(pool, pool.windows, block_size, step_tokens, gate.loaded_depth)


def _beside(chunks: ListOf[Chunk], budget: Budget, prompt_context_tokens: int) -> int:
    """Return how many prompt tokens, after `prompt_context_tokens`, may run beside the streams among `chunks`."""
    contexts = [chunk.end for chunk in chunks if chunk.samples]
    return budget.prompt_tokens(len(contexts), sum(contexts), prompt_context_tokens) if contexts else sys.maxsize
