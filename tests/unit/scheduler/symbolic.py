"""A model whose KV is legible: each slot holds the (position, token) it was computed for, or what a writer left behind.

What a row samples is a hash of the facts that it attends to, so an answer is right only if every page was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as ListOf

from tests.unit.grammar.grammars import byte_compiler, regex
from twostroke.base.ids import BlockHash, PageId, RequestId, SessionId
from twostroke.base.token_mask import Mask, candidates
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.windows.window_group import window_group_of
from twostroke.request import FinishReason, Grammar, PromptLogprobs, SampledToken, SamplingParams
from twostroke.scheduler.batch import Batch, SampleRow, StepResult
from twostroke.scheduler.batching import Step
from twostroke.scheduler.sequence import Sequence, building
from twostroke.scheduler.values import SchedulerLimits
from twostroke.speculation.draft import Proposal

VOCABULARY = 8
EOS = 7
GARBAGE = (-1, -1)
COMPILER = byte_compiler(VOCABULARY, (EOS,))
GRAMMARS = (
    regex(r"\x02\x03\x04\x05\x02\x03\x04\x05"),
    regex(r"([\x01-\x03]\x03\x04\x05)*[\x01\x02]"),
    regex(r"(\x00\x01\x01\x01\x01|[\x01\x02]\x06{2,7}|[\x03-\x06][\x00-\x06]*)"),
    regex(r"[\x00-\x06]*"),
)
"""Answers that are forced from the first token on, after each choice, after some choices alone, and never."""

Fact = tuple[int, int]


def limits(block_size: int = 4, *, max_model_len: int = 4096, align_chunks: bool = False) -> SchedulerLimits:
    return SchedulerLimits(block_size, max_model_len, (EOS,), align_chunks)


def next_token(context: ListOf[int], seed: int, banned: ListOf[int] = (), mask: Mask | None = None) -> int:
    """The model: a pure function of everything that it attends to, and of what may come."""
    ids = [*range(VOCABULARY)] if mask is None else candidates(mask, VOCABULARY, banned).tolist()
    allowed = [token for token in ids if mask is not None or token not in banned]
    digest = hashlib.blake2b(bytes(context), digest_size=4, salt=seed.to_bytes(8, "little")).digest()
    order = [(int.from_bytes(digest, "little") + offset) % VOCABULARY for offset in range(VOCABULARY)]
    return next(token for token in order if token in allowed)


def logprob_of(context: ListOf[int], token: int) -> float:
    """What the model says of a token behind a context: another number for each of both."""
    digest = hashlib.blake2b(bytes([*context, token]), digest_size=4).digest()
    return -float(int.from_bytes(digest, "little"))


def answer_alone(
    prompt: ListOf[int], params: SamplingParams, max_model_len: int, grammar: Grammar | None = None
) -> tuple[list[int], FinishReason]:
    """What a sequence must answer whatever runs beside it. Each token is sampled, those that are forced too."""
    known, state = list(prompt), None if grammar is None else COMPILER.state(grammar)
    ends_at_eos = grammar is not None or not params.ignore_eos
    while True:
        answered = len(known) - len(prompt)
        banned = (EOS, *params.stop_token_ids) if answered < params.min_tokens else ()
        known.append(next_token(known, params.seed, banned, None if state is None else state.mask))
        answer = known[len(prompt) :]
        if state is not None:
            state.consume(answer[-1])
        if answer[-1] in params.stop_token_ids or (answer[-1] == EOS and ends_at_eos):
            return answer, FinishReason.STOP
        if len(answer) == params.max_tokens or len(known) == max_model_len:
            return answer, FinishReason.LENGTH


def scores_of(context: ListOf[int], targets: ListOf[int], start: int) -> PromptLogprobs:
    """The logprobs of the targets, the first of which stands behind the token at `start`: facts of what it sees."""
    seen = [context[: start + rank + 1] for rank in range(len(targets))]
    numbers = [next_token([*before, target], 0) for before, target in zip(seen, targets, strict=True)]
    return PromptLogprobs.of([-float(number) for number in numbers], [len(before) for before in seen], (), ())


class GuessingDrafter:
    """Proposes what the model would say, mostly: it knows of no ban, and is wrong at one place in `wrong`."""

    def __init__(self, seed: int, wrong: int) -> None:
        self._seed = seed
        self._wrong = wrong

    def propose(self, known: ListOf[int], most: int) -> Proposal:
        guessed = list(known)
        while len(guessed) < len(known) + most:
            token = next_token(guessed, self._seed)
            guessed.append((token + 1) % VOCABULARY if len(guessed) % self._wrong == 0 else token)
        return Proposal(tuple(guessed[len(known) :]), "guess")


class SymbolicMemory:
    """The pool's pages and, as its listener, their new lives."""

    def __init__(self, pages: int, block_size: int) -> None:
        self.pages = pages
        self.block_size = block_size
        self.facts: dict[int, Fact] = {}
        self.readable: set[BlockHash] = set()

    def stored(self, names: ListOf[BlockHash]) -> None:
        assert not self.readable.intersection(names)
        self.readable.update(names)

    def removed(self, names: ListOf[BlockHash]) -> None:
        assert self.readable.issuperset(names)
        self.readable.difference_update(names)

    def evicting(self, page: PageId, block_hash: BlockHash, parent: BlockHash) -> None: ...

    def forgotten(self, block_hash: BlockHash) -> None: ...

    def new_writers(self, pages: ListOf[PageId]) -> None:
        for page in pages:
            for slot in self.slots(page):
                self.facts.pop(slot, None)

    def slots(self, page: PageId) -> range:
        return range(page * self.block_size, (page + 1) * self.block_size)

    def put(self, page: PageId, facts: ListOf[Fact]) -> None:
        self.facts.update(zip(self.slots(page), facts, strict=True))

    def block(self, page: PageId) -> list[Fact | None]:
        return [self.facts.get(slot) for slot in self.slots(page)]


class SymbolicRunner:
    def __init__(self, memory: SymbolicMemory, pool: BlockPool) -> None:
        self._memory = memory
        self._pool = pool
        self.computed_tokens = 0
        """Tokens whose KV was written."""

    def run(self, step: Step) -> StepResult:
        self.write(step)
        return self.attend(step)

    def write(self, step: Step) -> None:
        """The KV of each query token goes to its slot. Nobody else may be writing there, and nobody reading."""
        batch = step.batch
        kept = [slot for slot in batch.write_slots.tolist() if slot // self._memory.block_size < self._memory.pages]
        assert len(kept) == len(set(kept)), "one slot is written twice in one step"
        for row, chunk in enumerate(step.chunks):
            for index in range(batch.query_starts[row], batch.query_starts[row + 1]):
                page = PageId(int(batch.write_slots[index]) // self._memory.block_size)
                if page < self._memory.pages:
                    assert not self._pool.is_filled(page), "a page that others read is written"
                    assert not self._pool.is_arriving(page) or self._pool.writer(page) == chunk.sequence.session
                    self._memory.facts[int(batch.write_slots[index])] = (
                        int(batch.positions[index]),
                        int(batch.tokens[index]),
                    )
        self.computed_tokens += len(kept)

    def attend(self, step: Step) -> StepResult:
        """Every row reads its whole context, and must find exactly its own tokens there."""
        batch = step.batch
        contexts = [self._context(batch, row) for row in range(batch.sequences)]
        for row, chunk in enumerate(step.chunks):
            seen = [*chunk.sequence.known[: chunk.end], *chunk.proposed]
            assert contexts[row] == seen
            queries = slice(batch.query_starts[row], batch.query_starts[row + 1])
            assert batch.tokens[queries].tolist() == seen[chunk.start :]
            assert batch.positions[queries].tolist() == list(range(chunk.start, chunk.run_end))
        for sample in batch.samples:
            assert sample.position == len(contexts[sample.row]) - sample.behind
        self.look(step, contexts)
        return StepResult(
            tuple(_sampled(contexts[sample.row][: sample.position], sample) for sample in batch.samples),
            0.0,
            tuple(
                scores_of(contexts[score.row], score.targets, step.chunks[score.row].start) for score in batch.scores
            ),
        )

    def look(self, step: Step, contexts: ListOf[ListOf[int]]) -> None:
        """What else is to be checked of a step whose rows see these contexts."""

    def _context(self, batch: Batch, row: int) -> list[int]:
        block_size = self._memory.block_size
        tokens = []
        for position in range(batch.context_lens[row]):
            page = int(batch.block_tables[row, position // block_size])
            fact = self._memory.facts.get(page * block_size + position % block_size)
            assert fact is not None, f"row {row} reads position {position} of page {page}, which nobody wrote"
            assert fact[0] == position, f"row {row} reads position {fact[0]} where {position} belongs"
            tokens.append(fact[1])
        return tokens


def _sampled(context: ListOf[int], row: SampleRow) -> SampledToken:
    if row.mask is not None and not row.mask.any():
        return SampledToken(0, is_sound=False)
    token = next_token(context, row.params.seed, row.banned, row.mask)
    return SampledToken(token, None if row.params.logprobs is None else logprob_of(context, token))


class ExactRunner(SymbolicRunner):
    """A model whose pool takes whole blocks: rows see their own block in what is kept of unfinished ones."""

    def __init__(self, memory: SymbolicMemory, pool: BlockPool) -> None:
        super().__init__(memory, pool)
        self._exact: dict[int, dict[int, Fact]] = {}
        """Facts of unfinished blocks by their pages, each by its offset."""

    @property
    def unfinished(self) -> set[int]:
        """Pages whose blocks something is kept of."""
        return set(self._exact)

    def write(self, step: Step) -> None:
        super().write(step)
        batch, size = step.batch, self._memory.block_size
        for page in batch.released:
            self._exact.pop(page, None)
        for row in range(batch.sequences):
            for index in range(batch.query_starts[row], batch.query_starts[row + 1]):
                position = int(batch.positions[index])
                page = int(batch.block_tables[row, position // size])
                self._exact.setdefault(page, {})[position % size] = (position, int(batch.tokens[index]))

    def look(self, step: Step, contexts: ListOf[ListOf[int]]) -> None:
        """Every row must find its whole own block up to itself: as what it attends to, and as what will be stored."""
        batch, size = step.batch, self._memory.block_size
        for row, context in enumerate(contexts):
            for index in range(batch.query_starts[row], batch.query_starts[row + 1]):
                position = int(batch.positions[index])
                first = position // size * size
                own = self._exact[int(batch.block_tables[row, position // size])]
                seen = [own.get(each % size) for each in range(first, position + 1)]
                assert seen == [(each, context[each]) for each in range(first, position + 1)]


class WindowedRunner(SymbolicRunner):
    """A model that also has layers with a window, whose parts of blocks lie in slots of their own."""

    def __init__(self, memory: SymbolicMemory, pool: BlockPool, parts: SymbolicMemory, window: int) -> None:
        super().__init__(memory, pool)
        self._parts = parts
        """Its pages are numbered by rows: slots from the first one on."""
        self._window = window
        windows = window_group_of(pool)
        assert windows is not None
        self._windows = windows

    def write(self, step: Step) -> None:
        super().write(step)
        batch, size = step.batch, self._memory.block_size
        (places,) = batch.further
        first, rows = self._windows.shape.first, self._windows.shape.slots
        kept = [slot for slot in places.write_slots.tolist() if slot // size < rows]
        assert len(kept) == len(set(kept)), "one place of a window part is written twice in one step"
        for row, chunk in enumerate(step.chunks):
            for index in range(batch.query_starts[row], batch.query_starts[row + 1]):
                place, position = int(places.write_slots[index]), int(batch.positions[index])
                if place // size < rows:
                    slot = PageId(first + place // size)
                    assert not self._windows.is_filled(slot), "a window part that others read is written"
                    writer = self._windows.writer(slot)
                    assert not self._windows.is_arriving(slot) or writer == chunk.sequence.session
                    self._parts.facts[first * size + place] = (position, int(batch.tokens[index]))

    def look(self, step: Step, contexts: ListOf[ListOf[int]]) -> None:
        """Every row must find the last tokens of its context, as many as its window has."""
        batch, size = step.batch, self._memory.block_size
        (places,) = batch.further
        for row, context in enumerate(contexts):
            for index in range(batch.query_starts[row], batch.query_starts[row + 1]):
                position = int(batch.positions[index])
                for seen in range(max(0, position - self._window + 1), position + 1):
                    slot = self._windows.shape.first + int(places.block_tables[row, seen // size])
                    fact = self._parts.facts.get(slot * size + seen % size)
                    assert fact == (seen, context[seen]), f"row {row} at {position} finds {fact} of {seen} in {slot}"


class ExactWindowedRunner(WindowedRunner, ExactRunner):
    """A model with a window whose pool takes whole blocks."""

    def look(self, step: Step, contexts: ListOf[ListOf[int]]) -> None:
        WindowedRunner.look(self, step, contexts)
        ExactRunner.look(self, step, contexts)


def answering(number: int, prompt: ListOf[int], params: SamplingParams, block_size: int, salt: bytes = b"") -> Sequence:
    return Sequence(
        RequestId(f"answer-{number}"),
        SessionId(2 * number),
        list(prompt),
        len(prompt),
        block_hashes_of(prompt, block_size, salt),
        salt,
        params,
    )


def prefilling(number: int, tokens: ListOf[int], block_size: int) -> Sequence:
    hashes = block_hashes_of(tokens, block_size)
    return building(RequestId(f"pull-{number}"), SessionId(2 * number), tokens[: len(hashes) * block_size], hashes)


def pulling(number: int) -> SessionId:
    """The session of a pull: never that of a sequence."""
    return SessionId(2 * number + 1)
