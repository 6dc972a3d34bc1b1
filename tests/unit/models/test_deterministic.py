"""With --deterministic, and natively without: a row's bits depend on its sequence alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from tests.unit.kernels.pools.whole_pool import pool_over
from tests.unit.models.test_registry import SIZES, saved
from twostroke.base.errors import ConfigError
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.products.steady import SIZES as TILES
from twostroke.kernels.products.steady import agreeing_sizes
from twostroke.kv_cache.form import page_form
from twostroke.models.decoders.choice import LoadOptions, load_model
from twostroke.models.decoders.transformer import Model
from twostroke.models.registry import read_spec
from twostroke.models.rope import rope_tables

LONGEST, SEQUENCES = 96, 6
BLOCK, LARGER_BLOCK = 8, 16
HISTORIES = 1
DEEP = Qwen3Config(**SIZES | {"intermediate_size": 1536, "head_dim": 16, "num_hidden_layers": 3})
"""Sums of 1536 products: long enough for a library to have several ways to add them up."""

PATHS = {
    "native bfloat16": ("bfloat16", True, False, "bfloat16"),
    "native int8": ("bfloat16", True, True, "bfloat16"),
    "native bfloat16, pages of int8": ("bfloat16", True, False, "int8"),
    "native bfloat16, pages of fp8_e4m3": ("bfloat16", True, False, "fp8_e4m3"),
    "native bfloat16, blocks of 16": ("bfloat16", True, False, "bfloat16"),
    "native bfloat16, pages of int4": ("bfloat16", True, False, "int4"),
    "native bfloat16, pages of int4 with exact layers": ("bfloat16", True, False, "int4+1xbfloat16"),
    "float32": ("float32", True, False, "float32"),
    "float32, pages of fp8_e5m2": ("float32", True, False, "fp8_e5m2"),
    "float32 without kernels": ("float32", False, False, "float32"),
    "float32 without kernels, pages of int8": ("float32", False, False, "int8"),
    "float32 without kernels, pages of int4 with exact layers": ("float32", False, False, "int4+1xfloat32"),
    "bfloat16 without kernels": ("bfloat16", False, False, "bfloat16"),
    "float16 without kernels": ("float16", False, False, "float16"),
}
"""(dtype, native kernels, int8 weights, form of pages)"""

NIGHTLY = ("float16 without kernels", "float32 without kernels, pages of int8")
"""The slowest of those whose parts others have."""

STALE = 0xFF
"""What lies in pages before they are written: two of it, or four, are not a number."""


@dataclass(frozen=True, slots=True)
class Chunk:
    sequence: int
    start: int
    end: int


class Served:
    """A model over a pool in which sequence s has the pages from LONGEST / block * s on."""

    def __init__(self, directory: Path, path: str, kernels: Kernels) -> None:
        name, is_native, is_int8, form = PATHS[path]
        dtype: torch.dtype = getattr(torch, name)
        usable = kernels if is_native else None
        spec = read_spec(directory)
        self.form = page_form(form)
        self._block = LARGER_BLOCK if self.form.spans_block or path.endswith("blocks of 16") else BLOCK
        self._blocks = LONGEST // self._block
        self.shape = spec.page_shape(self._block)
        self.pages = torch.zeros(SEQUENCES * self._blocks, self.form.page_bytes(self.shape), dtype=torch.uint8)
        pool = pool_over(self.pages, self.form, self.shape, dtype)
        attention = choose_attention(
            pool, heads=spec.heads, rules=spec.rules, kernels=usable, dtype=dtype, is_deterministic=True
        )
        self.model: Model = load_model(
            directory, spec, attention, usable, LoadOptions(dtype=dtype, is_int8=is_int8, is_deterministic=True)
        )
        self._cosines, self._sines = rope_tables(spec.ropes, LONGEST)

    def step(self, prompts: list[torch.Tensor], chunks: list[Chunk]) -> torch.Tensor:
        """Logits of each chunk's last row."""
        at = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        starts = torch.tensor([0, *(chunk.end - chunk.start for chunk in chunks)]).cumsum(0)
        first_pages = torch.tensor([chunk.sequence for chunk in chunks]) * self._blocks
        of_row = first_pages.repeat_interleave(starts.diff())
        batch = RaggedBatch(
            positions=at.int(),
            query_starts=tuple(starts.tolist()),
            context_lens=tuple(chunk.end for chunk in chunks),
            block_tables=(first_pages[:, None] + torch.arange(self._blocks)).int(),
            write_slots=of_row * self._block + at,
            cosines=self._cosines[at],
            sines=self._sines[at],
        )
        tokens = torch.cat([prompts[chunk.sequence][chunk.start : chunk.end] for chunk in chunks]).int()
        logits = self.model.forward(tokens, batch, starts[1:] - 1)
        assert logits is not None
        return logits


def random_history(draw: random.Random, prompts: list[torch.Tensor]) -> Iterator[list[Chunk]]:
    """Steps that compute all prompts, in chunks of any size, in any company, in any order."""
    done = [0] * len(prompts)
    while left := [s for s, prompt in enumerate(prompts) if done[s] < len(prompt)]:
        chosen = draw.sample(left, draw.randint(1, len(left)))
        ends = {s: min(len(prompts[s]), done[s] + draw.choice((1, 1, 2, 7, 16, 33, LONGEST))) for s in chosen}
        yield [Chunk(s, done[s], ends[s]) for s in chosen]
        for s, end in ends.items():
            done[s] = end


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.slow if path in NIGHTLY else ()) for path in PATHS]
)
def test_pages_and_logits_have_the_same_bits_in_any_chunks_and_company(
    path: str, tmp_path: Path, kernels: Kernels
) -> None:
    saved(DEEP, tmp_path)
    served = Served(tmp_path, path, kernels)
    draw = random.Random(path)
    for history in range(HISTORIES):
        noise = torch.Generator().manual_seed(history)
        prompts = [torch.randint(131, (draw.randint(1, LONGEST),), generator=noise) for _ in range(SEQUENCES)]
        alone = [served.step(prompts, [Chunk(s, 0, len(prompt))])[0] for s, prompt in enumerate(prompts)]
        pages = served.pages.clone()
        served.pages.fill_(STALE)  # what is not computed yet must not be looked at
        for chunks in random_history(draw, prompts):
            for chunk, logits in zip(chunks, served.step(prompts, chunks), strict=True):
                if chunk.end == len(prompts[chunk.sequence]):
                    assert torch.equal(logits, alone[chunk.sequence]), f"history {history}: {chunk}"
        computed = served.pages != STALE
        assert torch.equal(served.pages[computed], pages[computed])
        served.pages.zero_()


class Uneven:
    """A product with other last bits in tiles of so many rows, or in one place of every tile."""

    def __init__(self, *, rows: int | None = None, place: int | None = None) -> None:
        self._rows, self._place = rows, place

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x.double().sum(1, keepdim=True).float()
        if len(x) == self._rows:
            y += 1e-6
        if self._place is not None:
            y[self._place] += 1e-6
        return y


def test_tiles_in_which_a_row_has_other_bits_are_not_used() -> None:
    assert agreeing_sizes(Uneven(), 8, torch.float32) == TILES
    assert agreeing_sizes(Uneven(rows=TILES[1]), 8, torch.float32) == (TILES[0], TILES[2])


def test_products_in_which_a_rows_place_matters_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--deterministic cannot be kept") as error:
        agreeing_sizes(Uneven(place=TILES[0] - 1), 8, torch.float32)
    assert error.value.field == "deterministic"
