"""A runner that waits instead of computing: the real control and page planes at any scale on a small machine.

`--model paced:KEY=VALUE,...`, every key optional:

    prefill_tokens_per_s  tokens of prompts computed per second                (10000)
    prefill_step_ms       added to every step that computes prompt tokens      (0)
    prefill_us_per_1k_pairs
                          added for 1000 pairs of a prompt token and a token
                          that it attends to                                   (0)
    step_ms               base of a step that samples                          (10)
    step_us_per_seq       added to it for every sequence that samples          (100)
    page_bytes            bytes of one page, at least 8 per token of a block   (16384, or that least)
    window                tokens that layers with a window see                 (none: no layer has one)
    window_page_bytes     bytes of one page of those layers                    (as page_bytes)
    vocab                 size of the vocabulary; text is bytes                (32000)
    max_model_len         tokens of prompt and answer together                 (32768)
    eos                   token id that ends an answer, drawn one time in 64   (none: never)
    weights               stands for the weights: another number, other tokens (0)

Tokens depend on pages as a real model's do. Each token has a hash of its id and position. The slot of position p in its
page holds the running hash: the sum of the token hashes up to p, modulo 2^64. A sampled token is a hash over the last
slot of every block of its context, and over all slots of one block, a different block for each sampled token. So a
missing, stale or wrong page changes the tokens, and a single wrong bit changes some token of a long answer. A stream
that was moved has the same tokens as one that was not.

With a window, the slot of a token in the window group holds a hash of the token and its position. The running hash
includes the hash of the first token inside the window. A sampled token includes the hashes of one whole block inside
the window, a different block for each sampled token.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from twostroke.base.errors import ConfigError
from twostroke.base.token_mask import candidates
from twostroke.engine.extras import NO_EXTRA, StepExtra
from twostroke.kv_cache.groups.page_group import PageGroup, page_groups
from twostroke.kv_cache.memory import PageMemory
from twostroke.request import PromptLogprobs, SampledToken
from twostroke.scheduler.batch import Batch, SampleRow, ScoreRow, StepResult
from twostroke.scheduler.cost import StepCost, StepTerms

SLOT_BYTES: Final = 8
"""Bytes of the running hash at one token."""

PAGE_BYTES: Final = 16_384
"""Default size of a page: large enough to be worth a transfer, small enough for long contexts in little memory."""

EOS_ONE_IN: Final = 64
"""One drawn token in this many is the end-of-sequence token, where there is one."""

_LETTERS: Final = (ord("a"), 26)
"""First id and number of the tokens that are drawn where the vocabulary has them: letters, so that answers can be read.
"""

_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_STRIDE: Final = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedSpec:
    prefill_tokens_per_s: float = 10_000.0
    prefill_step_ms: float = 0.0
    prefill_us_per_1k_pairs: float = 0.0
    step_ms: float = 10.0
    step_us_per_seq: float = 100.0
    page_bytes: int | None = None
    window: int | None = None
    window_page_bytes: int | None = None
    vocab: int = 32_000
    max_model_len: int = 32_768
    eos: int | None = None
    weights: int = 0

    def __post_init__(self) -> None:
        finite = math.isfinite
        rate = self.prefill_tokens_per_s
        _require(finite(rate) and rate > 0, "prefill_tokens_per_s", "positive", rate)
        costs = {
            "prefill_step_ms": self.prefill_step_ms,
            "prefill_us_per_1k_pairs": self.prefill_us_per_1k_pairs,
            "step_ms": self.step_ms,
            "step_us_per_seq": self.step_us_per_seq,
        }
        for key, value in costs.items():
            _require(finite(value) and value >= 0, key, "0 or more", value)
        _require(self.window is None or self.window >= 1, "window", "at least 1", self.window)
        _require(
            self.window_page_bytes is None or self.window is not None,
            "window_page_bytes",
            "left out without window",
            self.window_page_bytes,
        )
        _require(self.vocab >= 2, "vocab", "at least 2", self.vocab)
        _require(self.max_model_len >= 2, "max_model_len", "at least 2", self.max_model_len)
        _require(self.eos is None or 0 <= self.eos < self.vocab, "eos", "a token id below vocab", self.eos)

    @classmethod
    def parse(cls, text: str) -> PacedSpec:
        """Parses "key=value,...". Raises ConfigError naming the key that is unknown or wrong."""
        values: dict[str, float | int] = {}
        kinds = {field.name: float if field.type == "float" else int for field in dataclasses.fields(cls)}
        for entry in filter(None, text.split(",")):
            key, _, value = (part.strip() for part in entry.partition("="))
            if key not in kinds:
                raise ConfigError(f"--model paced: unknown key {key!r}; known are {sorted(kinds)}", field=key)
            if key in values:
                raise ConfigError(f"--model paced: {key} is given twice", field=key)
            try:
                values[key] = kinds[key](value)
            except ValueError as error:
                raise ConfigError(f"--model paced: {key} must be a number, got {value!r}", field=key) from error
        return cls(**values)  # type: ignore[arg-type]  # every value was made by its field's own type

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return () if self.eos is None else (self.eos,)

    def page_bytes_for(self, block_size: int) -> int:
        """Returns the bytes of a page of the first group."""
        least = block_size * SLOT_BYTES
        if self.page_bytes is not None:
            _require(
                self.page_bytes >= least, "page_bytes", f"at least {least} for blocks of {block_size}", self.page_bytes
            )
        return self.page_bytes or max(PAGE_BYTES, least)

    def page_sizes_for(self, block_size: int) -> tuple[int, ...]:
        """Returns the bytes of a page of each group."""
        full, least, own = self.page_bytes_for(block_size), block_size * SLOT_BYTES, self.window_page_bytes
        if self.window is None:
            return (full,)
        if own is not None:
            _require(own >= least, "window_page_bytes", f"at least {least} for blocks of {block_size}", own)
        return (full, own or full)

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        return page_groups((None,) if self.window is None else (None, self.window))

    @property
    def cost(self) -> StepCost:
        return StepCost(
            step_s=self.step_ms / 1e3,
            stream_s=self.step_us_per_seq / 1e6,
            prompt_token_s=1 / self.prefill_tokens_per_s,
            prompt_step_s=self.prefill_step_ms / 1e3,
            prompt_pair_s=self.prefill_us_per_1k_pairs / 1e9,
        )


class PacedRunner:
    """Does what a ModelRunner does for its callers.

    Of the sampling parameters, tokens depend only on seed and choice, and these count only at a temperature above 0.
    """

    def __init__(self, spec: PacedSpec, memory: PageMemory, *, block_size: int, extra: StepExtra = NO_EXTRA) -> None:
        """`extra` returns a number for each sequence of a step. Numbers other than 0 change the sequence's tokens."""
        self._spec = spec
        self._cost = spec.cost
        self._block_size = block_size
        self._weights = np.uint64(spec.weights * int(_STRIDE) % (1 << 64))
        self._extra = extra
        self._slots: Hashes = memory.data[:, : block_size * SLOT_BYTES].view(np.uint64)
        self._windows = None
        if spec.window is not None:
            self._windows = _WindowPages(memory.regions[1][:, : block_size * SLOT_BYTES].view(np.uint64), spec.window)

    def run(self, batch: Batch) -> StepResult:
        started_s = time.perf_counter()
        seeds: Hashes | None = self._extra.of_step(batch)
        self._advance(batch, seeds)
        tokens = self._sample(batch, seeds) if batch.samples else ()
        scores = tuple([self._scored(batch, row) for row in batch.scores])
        planned_s = self._cost.of(StepTerms.of(batch))
        time.sleep(max(0.0, started_s + planned_s - time.perf_counter()))
        return StepResult(tokens, time.perf_counter() - started_s, scores)

    def close(self) -> None:
        """Drops the references to the pages, so that their memory can be unmapped."""
        del self._slots, self._windows

    def _advance(self, batch: Batch, seeds: Hashes | None) -> None:
        """Writes the running hashes of all new tokens: a cumulative sum over the batch, corrected by sequence."""
        starts, positions = batch.query_starts[:-1], batch.positions
        first = positions[starts]
        before = np.where(first > 0, self._slots_at(batch.block_tables, np.maximum(first - 1, 0)), np.uint64(0))
        hashes = _mix((batch.tokens.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64) ^ self._weights)
        if seeds is not None:
            of_tokens = np.repeat(seeds, np.diff(batch.query_starts))
            hashes = np.where(of_tokens, _mix(hashes ^ of_tokens), hashes)  # tokens without a seed keep their hash
        if self._windows is not None:
            hashes += self._windows.write(batch, hashes)
        sums = np.cumsum(hashes, dtype=np.uint64)
        before += hashes[starts] - sums[starts]  # subtracts what the sum contains of the sequences before this one
        pages, offsets = np.divmod(batch.write_slots, self._block_size)
        self._slots[pages, offsets] = sums + np.repeat(before, np.diff(batch.query_starts))

    def _slots_at(self, tables: npt.NDArray[np.int32], positions: npt.NDArray[np.int32]) -> Hashes:
        """Returns the running hash of each sequence up to its position."""
        blocks, offsets = np.divmod(positions, self._block_size)
        slots: Hashes = self._slots[tables[np.arange(len(tables)), blocks], offsets]
        return slots

    def _sample(self, batch: Batch, extra_seeds: Hashes | None) -> tuple[SampledToken, ...]:
        rows = [sample.row for sample in batch.samples]
        behind = np.array([sample.behind for sample in batch.samples], np.int32)
        tables, context_lens = batch.block_tables[rows], batch.context_lens[rows] - behind
        blocks = context_lens // self._block_size
        ends = self._slots[tables, self._block_size - 1]
        positions = np.arange(tables.shape[1])
        block_hashes = _mix(ends ^ ((positions + 1).astype(np.uint64) * _STRIDE))
        states = np.where(positions < blocks[:, None], block_hashes, np.uint64(0)).sum(axis=1, dtype=np.uint64)
        states += self._slots_at(tables, context_lens - 1)
        whole_block = tables[np.arange(len(rows)), context_lens % np.maximum(blocks, 1)]
        states += np.where(blocks > 0, _mix(self._slots[whole_block]).sum(axis=1, dtype=np.uint64), np.uint64(0))
        if self._windows is not None:
            states += self._windows.seen(batch, rows, context_lens)
        if extra_seeds is not None:
            states ^= extra_seeds[rows]
        seeds = [sample.params.seed + sample.params.choice * int(_STRIDE) for sample in batch.samples]
        draws = np.array([sample.params.temperature > 0 for sample in batch.samples])
        states ^= np.where(draws, _mix(np.array([seed % (1 << 64) for seed in seeds], np.uint64)), np.uint64(0))
        return tuple(map(self._sampled, _mix(states).tolist(), batch.samples))

    def _scored(self, batch: Batch, score: ScoreRow) -> PromptLogprobs:
        """Returns numbers that depend on the page of each token, as logprobs do."""
        first, count, vocab = batch.query_starts[score.row], len(score.targets), self._spec.vocab
        tables = np.repeat(batch.block_tables[[score.row]], count, axis=0)
        numbers = _mix(self._slots_at(tables, batch.positions[first : first + count])) % np.uint64(vocab)
        tops = [[(number + index) % vocab for index in range(score.top)] for number in numbers.tolist()]
        return PromptLogprobs.of(
            (-numbers.astype(np.float64) / vocab).tolist(),
            (numbers + np.uint64(1)).tolist(),
            itertools.chain.from_iterable(tops),
            [-float(index) for _ in tops for index in range(score.top)],
        )

    def _sampled(self, number: int, sample: SampleRow) -> SampledToken:
        token, logprobs = self._token(number, sample), sample.params.logprobs
        if token is None:
            return SampledToken(0, is_sound=False)
        if logprobs is None:
            return SampledToken(token)
        named = sample.params.logprob_token_ids or ((token,) if logprobs else ())
        return SampledToken(token, 0.0, tuple([(other, 0.0) for other in named]))

    def _token(self, number: int, sample: SampleRow) -> int | None:
        """Returns a token. None: a grammar has failed and permits none."""
        eos, banned = self._spec.eos, sample.banned
        if sample.mask is not None:
            ids = candidates(sample.mask, self._spec.vocab, banned)
            return int(ids[number % len(ids)]) if len(ids) else None
        number, remainder = divmod(number, EOS_ONE_IN)
        if eos is not None and remainder == 0 and eos not in banned:
            return eos
        first, count = _LETTERS if self._spec.vocab >= sum(_LETTERS) else (0, self._spec.vocab)
        tokens = _allowed(first, count, banned, eos)
        return tokens[number % len(tokens)]


class _WindowPages:
    """The pages of the window group. Each slot holds a hash of the token there."""

    def __init__(self, slots: Hashes, window: int) -> None:
        self._slots = slots
        self._window = window

    def write(self, batch: Batch, tokens: Hashes) -> Hashes:
        """Writes hashes of the tokens. Returns, for each token, the hash of the first token in its window."""
        (places,) = batch.further
        block = self._slots.shape[1]
        pages, offsets = np.divmod(places.write_slots, block)
        self._slots[pages, offsets] = _mix(tokens)
        rows = np.repeat(np.arange(batch.sequences), np.diff(batch.query_starts))
        blocks, offsets = np.divmod(np.maximum(batch.positions - (self._window - 1), 0), block)
        first: Hashes = self._slots[places.block_tables[rows, blocks], offsets]
        return first

    def seen(self, batch: Batch, rows: list[int], context_lens: npt.NDArray[np.int32]) -> Hashes:
        """Returns, for each row, a hash of one block that is entirely in the window of the row's last token."""
        (places,) = batch.further
        block = self._slots.shape[1]
        lengths = context_lens.astype(np.int64)
        first = -(-np.maximum(lengths - self._window, 0) // block)
        count = lengths // block - first
        chosen = np.where(count > 0, first + lengths % np.maximum(count, 1), 0)
        pages = places.block_tables[rows, chosen]
        return np.where(count > 0, _mix(self._slots[pages]).sum(axis=1, dtype=np.uint64), np.uint64(0))


@functools.lru_cache(maxsize=64)
def _allowed(first: int, count: int, banned: tuple[int, ...], eos: int | None) -> tuple[int, ...]:
    return tuple(token for token in range(first, first + count) if token not in banned and token != eos)


def _mix(numbers: Hashes) -> Hashes:
    """Applies SplitMix64's finaliser."""
    z = numbers + _STRIDE
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    mixed: Hashes = z ^ (z >> np.uint64(31))
    return mixed


def _require(holds: bool, key: str, requirement: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"--model paced: {key} must be {requirement}, got {value}", field=key)
