"""Converts a page into one of another form: the bits that the other form's kernels store for the same keys and values.

Numbers of one byte become wide by their scales first, as attention reads them. A page in the order of native kernels
(`native/page.h`) is first brought into plain rows of tokens. Then it is brought into the order of the other form.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from twostroke.kernels.page_forms.nibble_pool import check_shape, packed, unpacked
from twostroke.kernels.pools.page_pool import BYTES, PLAIN, PagePool, quantised
from twostroke.kv_cache.form import AnyForm, Conversion, PagePart, page_form

PIECE: Final = 16
"""Tokens of a piece: `PIECE` in native/page.h."""
IN_PAIRS: Final = frozenset({"bfloat16", *BYTES})
"""Formats of which one multiply-add takes a pair: `PER_WORD` in native/page.h. Of others it takes one number."""
CHUNK_NUMBERS: Final = 1 << 16
"""Numbers that are converted together: they stay in a core's cache."""


def convert_page(conversion: Conversion, source: torch.Tensor, target: torch.Tensor) -> None:
    """Fills `target`, uint8 [target page bytes], with what `source`, uint8 [source page bytes], stores.

    Raises ConfigError for a form that cannot store such heads or blocks.
    """
    shape = conversion.shape
    chunk = max(1, CHUNK_NUMBERS // (2 * shape.kv_heads * shape.block * shape.head_dim))
    pages = (
        _parts(conversion, page_form(form.format), data)
        for form, data in ((conversion.source, source), (conversion.target, target))
    )
    for (there, read), (here, written) in itertools.product(*pages):
        heads, layers = _common(there.heads, here.heads), _common(there.layers, here.layers)
        if not heads or not layers:
            continue
        own, others = (_within(heads, part.heads) for part in (here, there))
        if there.form == here.form:
            places = written.parts(_within(layers, here.layers), own)
            for place, numbers in zip(places, read.parts(_within(layers, there.layers), others), strict=True):
                place.copy_(numbers)
            continue
        for first in range(layers.start, layers.stop, chunk):
            some = range(first, min(first + chunk, layers.stop))
            rows = read.read(_within(some, there.layers))[:, :, others]
            written.write(_within(some, here.layers), own, rows)


def _common(one: slice, other: slice) -> range:
    """Returns the numbers that two slices have in common; none where they do not meet."""
    first = max(one.start, other.start)
    return range(first, max(first, min(one.stop, other.stop)))


def _within(numbers: range, whole: slice) -> slice:
    """Returns where consecutive numbers are in a slice that has them."""
    return slice(numbers.start - whole.start, numbers.stop - whole.start)


class _Page(Protocol):
    """One page, or a part of its layers, as rows [layers, 2, kv_heads, block, head_dim]."""

    def read(self, layers: slice) -> torch.Tensor:
        """Returns what attention reads: float32, or of the plain format."""

    def write(self, layers: slice, heads: slice, rows: torch.Tensor) -> None: ...

    def parts(self, layers: slice, heads: slice) -> list[torch.Tensor]:
        """Returns views of what it stores, as it lies."""


def _parts(conversion: Conversion, form: AnyForm, data: torch.Tensor) -> list[tuple[PagePart, _Page]]:
    """Returns the parts of the page that `data` is, each with its numbers."""
    return [(part, _part_of(conversion, part, data[part.bytes])) for part in form.parts(conversion.shape)]


def _part_of(conversion: Conversion, part: PagePart, data: torch.Tensor) -> _Page:
    shape, centers = part.shape, conversion.key_centers
    if part.form.spans_block:
        check_shape(shape)
        return _NibblePage(data.view(shape.layers, shape.kv_heads, -1), shape.head_dim)
    own = None if centers is None else torch.from_numpy(centers[part.layers, part.heads])
    return _TokenPage(PagePool.over(data[None], part.form, shape, own), conversion.has_pieces)


@dataclass(frozen=True, slots=True)
class _TokenPage:
    """A page of a form that stores each token on its own."""

    page: PagePool
    has_pieces: bool

    def read(self, layers: slice) -> torch.Tensor:
        stored, name = self.page.numbers[0, layers], self.page.form.name
        rows = _rows(stored, name) if self.has_pieces else stored
        if self.page.scales is None:
            return rows
        return self._moved(
            rows.view(BYTES[name]).float() * self.page.scales[0, layers][..., None], layers, slice(None), 1
        )

    def write(self, layers: slice, heads: slice, rows: torch.Tensor) -> None:
        name = self.page.form.name
        if self.page.scales is None:
            numbers = rows.to(PLAIN[name])
        else:
            moved = self._moved(rows.float(), layers, heads, -1)
            numbers, self.page.scales[0, layers, :, heads] = quantised(moved, name)
        self.page.numbers[0, layers, :, heads] = _pieces(numbers, name) if self.has_pieces else numbers

    def parts(self, layers: slice, heads: slice) -> list[torch.Tensor]:
        both = (self.page.numbers, self.page.scales)
        return [each[0, layers, :, heads] for each in both if each is not None]

    def _moved(self, rows: torch.Tensor, layers: slice, heads: slice, times: int) -> torch.Tensor:
        """Returns float32 rows. The centers of keys are added so many times."""
        centers = self.page.key_centers
        if centers is None:
            return rows
        keys = rows[:, 0] + times * centers[layers, heads, None]
        return torch.stack((keys, rows[:, 1]), dim=1)


@dataclass(frozen=True, slots=True)
class _NibblePage:
    """A page of 4-bit numbers; its order is the same for all kernels."""

    heads: torch.Tensor
    """uint8 [layers, kv_heads, bytes of a head's block]"""
    head_dim: int

    def read(self, layers: slice) -> torch.Tensor:
        return unpacked(self.heads[layers], self.head_dim).transpose(1, 2)

    def write(self, layers: slice, heads: slice, rows: torch.Tensor) -> None:
        self.heads[layers, heads] = packed(rows.transpose(1, 2))

    def parts(self, layers: slice, heads: slice) -> list[torch.Tensor]:
        return [self.heads[layers, heads]]


def _word(name: str) -> int:
    return 2 if name in IN_PAIRS else 1


def _rows(stored: torch.Tensor, name: str) -> torch.Tensor:
    """Undos `_pieces`."""
    layers, _, heads, block, dim = stored.shape
    word, flat = _word(name), stored.flatten(-2)
    keys = flat[:, 0].reshape(layers, heads, -1, dim // word, PIECE, word).transpose(3, 4)
    values = flat[:, 1].reshape(layers, heads, -1, PIECE // word, dim, word).transpose(4, 5)
    return torch.stack([part.reshape(layers, heads, block, dim) for part in (keys, values)], dim=1)


def _pieces(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Orders rows [layers, 2, kv_heads, block, head_dim] as native kernels do, within each head of a block."""
    layers, _, heads, block, dim = rows.shape
    word = _word(name)
    keys = rows[:, 0].reshape(layers, heads, -1, PIECE, dim // word, word).transpose(3, 4)
    values = rows[:, 1].reshape(layers, heads, -1, PIECE // word, word, dim).transpose(4, 5)
    return torch.stack([part.reshape(layers, heads, block, dim) for part in (keys, values)], dim=1)
