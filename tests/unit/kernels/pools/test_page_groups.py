"""Layers with a window in a page group of their own: rows come out as over pages that hold all layers, to the bit,
whatever lies in pages that the window has left."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch

from tests.unit.kernels.page_forms.test_page_forms import PATHS, VARIANTS, Prompts, random_history
from tests.unit.kernels.pools.whole_pool import pool_over
from twostroke.config.cache import KV_FORMATS
from twostroke.kernels.attention.interface import AttentionBackend, RaggedBatch, RaggedPlaces
from twostroke.kernels.attention.rules import AttentionRule
from twostroke.kernels.choice import choose_attention, grouped_pool
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.pools.parted_pool import AnyPool
from twostroke.kv_cache.form import page_form
from twostroke.kv_cache.groups.page_group import PageGroup, page_groups
from twostroke.page_forms.page_form import PageShape

BLOCK = 16
WINDOWS = (40, 24, None, 40, None, 40)
RULES = tuple(AttentionRule(scale=0.125, window=window) for window in WINDOWS)
FULL, WINDOW = page_groups(WINDOWS)
SHAPE = PageShape(len(WINDOWS), 2, BLOCK, 64)
NO_NUMBERS = 0xFF
"""Bytes that are NaN in every form that has NaN, and the largest scales in others."""
Spans = list[tuple[int, int, int]]


@dataclass(eq=False)
class WindowRows:
    """Rows of the window group's pages, each of one block at a time. Tables name row 0 for what is gone."""

    pages: torch.Tensor
    """uint8 [rows, page bytes]"""
    group: PageGroup
    held: dict[tuple[int, int], int] = field(default_factory=dict)
    """The row of each block, by sequence and index in it."""

    def places(self, batch: RaggedBatch, spans: Spans) -> RaggedPlaces:
        """Gives rows to the blocks that a step's tokens see or are; takes them from others of its sequences."""
        tables = torch.zeros_like(batch.block_tables)
        slots = []
        for row, (sequence, start, end) in enumerate(spans):
            first = self.group.first_block(start, BLOCK)
            for left in [key for key in self.held if key[0] == sequence and key[1] < first]:
                self.pages[self.held.pop(left)] = NO_NUMBERS
            for block in range(first, -(-end // BLOCK)):
                tables[row, block] = self.held.setdefault((sequence, block), self._free_row())
            at = torch.arange(start, end)
            slots.append(tables[row, at // BLOCK].long() * BLOCK + at % BLOCK)
        return RaggedPlaces(tables, torch.cat(slots))

    def _free_row(self) -> int:
        return next(row for row in range(1, len(self.pages)) if row not in self.held.values())


def backend_over(pool: AnyPool, prompts: Prompts, kernels: Kernels | None, *, steady: bool) -> AttentionBackend:
    return choose_attention(
        pool, heads=prompts.heads, rules=RULES, kernels=kernels, dtype=prompts.dtype, is_deterministic=steady
    )


def rows_of(prompts: Prompts, backend: AttentionBackend, batch: RaggedBatch, spans: Spans) -> torch.Tensor:
    """Stores and attends in all layers: [layers, T, heads * D]."""
    step, rows = backend.begin(batch), []
    parts = [[x[start:end] for x in prompts.rows(sequence)] for sequence, start, end in spans]
    for layer in range(SHAPE.layers):
        q, k, v = (torch.cat(each).contiguous() * (1 + layer / 4) for each in zip(*parts, strict=True))
        rows.append(step.attend(layer, step.store(layer, q, k, v)))
    return torch.stack(rows)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", [*KV_FORMATS, "int4+1xbfloat16"])
def test_rows_are_the_same_bits_whatever_lies_in_pages_that_the_window_has_left(
    built_kernels: Mapping[str, Kernels], path: str, form: str
) -> None:
    prompts = Prompts(SHAPE, 6, (300, 90, 33) if path in VARIANTS else (90, 33), torch.bfloat16, 4)
    kernels, shapes = built_kernels.get(path), [SHAPE.of_layers(group.layers) for group in (FULL, WINDOW)]
    whole = backend_over(prompts.over(prompts.data(form), form), prompts, kernels, steady=path not in VARIANTS)
    pages = [torch.full((count, page_form(form).page_bytes(shape)), NO_NUMBERS).to(torch.uint8)
             for count, shape in zip((len(prompts.lengths) * prompts.blocks, 60), shapes, strict=True)]  # fmt: skip
    pool = grouped_pool(pages, page_form(form), shapes, prompts.dtype)
    grouped, window = backend_over(pool, prompts, kernels, steady=path not in VARIANTS), WindowRows(pages[1], WINDOW)
    for spans in random_history(prompts, 7):
        batch = prompts.batch(spans)
        expected = rows_of(prompts, whole, batch, spans)
        own = replace(batch, further=(window.places(batch, spans),))
        assert torch.equal(rows_of(prompts, grouped, own, spans), expected), spans
    assert (pages[1][0] == NO_NUMBERS).all()


@pytest.mark.parametrize("block", [4, 8, 32])
def test_blocks_of_other_sizes_are_not_read_either(kernels: Kernels, block: int) -> None:
    shape = replace(SHAPE, block=block)
    prompts = Prompts(shape, 6, (333,), torch.bfloat16, 2)
    data, form = prompts.data("bfloat16"), page_form("bfloat16")
    backend = backend_over(pool_over(data, form, shape, torch.bfloat16), prompts, kernels, steady=False)
    spans = [(0, 0, 320)]
    rows_of(prompts, backend, prompts.batch(spans), spans)
    last = [(0, 320, 333)]
    expected = rows_of(prompts, backend, prompts.batch(last), last)
    seen = AttentionRule(scale=1, window=40).first_visible(320) // block
    gone = prompts.batch(last).block_tables[0, :seen].long()
    layers = data.view(torch.bfloat16).view(len(data), *shape.dims)
    for layer in WINDOW.layers:
        layers[gone, layer] = torch.nan
    assert torch.equal(rows_of(prompts, backend, prompts.batch(last), last), expected)


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4", "int4+1xbfloat16", "int4+2xfloat32"])
def test_the_pages_of_both_groups_take_the_bytes_of_one_page_of_all_layers(form: str) -> None:
    shapes = [SHAPE.of_layers(group.layers) for group in (FULL, WINDOW)]
    assert sum(map(page_form(form).page_bytes, shapes)) == page_form(form).page_bytes(SHAPE)


def test_a_model_has_two_groups_where_some_of_its_layers_have_a_window_and_others_none() -> None:
    assert PageGroup("full", (2, 4)) == FULL
    assert PageGroup("window", (0, 1, 3, 5), 40) == WINDOW
    assert page_groups((None, None)) == page_groups((8, 8)) == (PageGroup("full", (0, 1)),)
    first: Callable[[int], int] = lambda position: WINDOW.first_block(position, BLOCK)  # noqa: E731
    assert [first(position) for position in (0, 39, 54, 55, 71)] == [0, 0, 0, 1, 2]
    assert FULL.first_block(1000, BLOCK) == 0
