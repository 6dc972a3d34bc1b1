"""The arguments of a launch over pages, as tensors on the device: spans that attend, and slots to write to.

A span is query rows that lie together, and the context that the last of them attends to. A decoding sequence is a span
of one row; a chunk of a prompt is cut into spans of at most a tile's rows. Row r of a span with `rows` rows and context
c attends to positions 0..c - rows + r.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from twostroke.kernels.attention.interface import RaggedBatch, RaggedPlaces

FIELDS: Final = 4
"""Numbers of one span: its row of the block tables, its first query row, its query rows, its context."""

Span = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The spans of one launch. The tensors may be rewritten between launches, but the bounds must stay valid."""

    fields: torch.Tensor
    """int32 [spans, FIELDS], contiguous"""
    block_tables: torch.Tensor
    """int32 [sequences, widest], rows contiguous"""
    most_rows: int
    """The most query rows of a span, or more."""
    longest_context: int
    """The longest context of a span, or more."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenSlots:
    """The write slot and the rotation of each of T tokens."""

    write_slots: torch.Tensor
    """int64 [T]: page * block + offset"""
    cosines: torch.Tensor
    """float32 [T, ropes * head_dim / 2], of each token's position: the ropes of the model side by side"""
    sines: torch.Tensor
    exact_slots: torch.Tensor | None = None
    """int64 [T]: exact page * block + offset, in forms whose scales span a block"""
    further: tuple[RaggedPlaces, ...] = ()
    """Places in each further page group, with block tables that replace those of the spans. Empty where its pages lie
    where the first group's do."""

    def of_group(self, group: int, spans: Spans) -> tuple[Spans, TokenSlots]:
        """Returns spans and slots as layers of one page group see them."""
        if group == 0 or not self.further:
            return spans, self
        own = self.further[group - 1]
        return (
            replace(spans, block_tables=own.block_tables),
            replace(self, write_slots=own.write_slots, further=()),
        )


def spans_of(batch: RaggedBatch) -> list[Span]:
    """Returns one whole span per sequence."""
    starts = batch.query_starts
    return [
        (sequence, starts[sequence], starts[sequence + 1] - starts[sequence], context)
        for sequence, context in enumerate(batch.context_lens)
    ]


def spans_by_length(batch: RaggedBatch, short_rows: int) -> tuple[list[Span], list[Span], list[Span]]:
    """Returns the spans of one row, those of at most `short_rows`, and longer ones."""
    spans = spans_of(batch)
    single = [span for span in spans if span[2] == 1]
    short = [span for span in spans if 1 < span[2] <= short_rows]
    long = [span for span in spans if span[2] > short_rows]
    return single, short, long


def spans_on(device: torch.device, groups: Sequence[Sequence[Span]], block_tables: torch.Tensor) -> list[Spans | None]:
    """Returns the spans of each group's launch, copied to the device at once; None where a group is empty."""
    fields = span_fields([span for group in groups for span in group], device)
    made: list[Spans | None] = []
    for group, own in zip(groups, torch.split_with_sizes(fields, [len(group) for group in groups]), strict=True):
        most_rows, longest = (max((span[field] for span in group), default=0) for field in (2, 3))
        made.append(Spans(own, block_tables, most_rows, longest) if group else None)
    return made


def cut_into_tiles(spans: Iterable[Span], tile_rows: int) -> list[Span]:
    """Cuts spans into those of at most `tile_rows` rows. The longest contexts come first: a launch should not end on
    its longest work."""
    tiles = []
    for sequence, first, rows, context in spans:
        for done in range(0, rows, tile_rows):
            part = min(tile_rows, rows - done)
            tiles.append((sequence, first + done, part, context - rows + done + part))
    return sorted(tiles, key=lambda tile: -tile[3])


def span_fields(spans: Sequence[Span], device: torch.device) -> torch.Tensor:
    """Returns `Spans.fields` on `device`. The copy is made in the order of the stream, and the host does not wait for
    it."""
    on_host = torch.tensor(spans, dtype=torch.int32).view(-1, FIELDS)
    if device.type != "cuda":
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)
