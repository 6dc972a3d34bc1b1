"""Converts a page into one of another form: the bits that the other form's kernels store for the same keys and values.

Numbers of one byte become wide by their scales first, as attention reads them. A page in the order of native kernels
(`native/page.h`) is brought into plain rows of a token, and back into the order of the other form.
"""

from __future__ import annotations

from typing import Final

import torch

from twostroke.kernels.page_pool import BYTES, PLAIN, PagePool, quantised
from twostroke.kv_cache.form import FORMS, Conversion

PIECE: Final = 16
"""Tokens of a piece: `PIECE` in native/page.h."""
IN_PAIRS: Final = frozenset({"bfloat16", *BYTES})
"""Formats of which one multiply-add takes a pair: `PER_WORD` in native/page.h. Of others it takes one number."""
CHUNK_NUMBERS: Final = 1 << 16
"""Numbers that are converted together: they stay in a core's cache."""


def convert_page(conversion: Conversion, source: torch.Tensor, target: torch.Tensor) -> None:
    """Fill `target`, uint8 [target page bytes], with what `source`, uint8 [source page bytes], stores."""
    shape = conversion.shape
    read = PagePool.over(source[None], FORMS[conversion.source.format], shape)
    written = PagePool.over(target[None], FORMS[conversion.target.format], shape)
    chunk = max(1, CHUNK_NUMBERS // (2 * shape.kv_heads * shape.block * shape.head_dim))
    for first in range(0, shape.layers, chunk):
        layers = slice(first, first + chunk)
        _write(written, layers, _read(read, layers, has_pieces=conversion.has_pieces), conversion.has_pieces)


def _read(page: PagePool, layers: slice, *, has_pieces: bool) -> torch.Tensor:
    """Return what attention reads: rows [layers, 2, kv_heads, block, head_dim], float32 or of the plain format."""
    stored = page.numbers[0, layers]
    rows = _rows(stored, page.form.name) if has_pieces else stored
    if page.scales is None:
        return rows
    return rows.view(BYTES[page.form.name]).float() * page.scales[0, layers][..., None]


def _write(page: PagePool, layers: slice, rows: torch.Tensor, has_pieces: bool) -> None:
    name = page.form.name
    if page.scales is None:
        numbers = rows.to(PLAIN[name])
    else:
        numbers, page.scales[0, layers] = quantised(rows, name)
    page.numbers[0, layers] = _pieces(numbers, name) if has_pieces else numbers


def _word(name: str) -> int:
    return 2 if name in IN_PAIRS else 1


def _rows(stored: torch.Tensor, name: str) -> torch.Tensor:
    """Undo `_pieces`."""
    layers, _, heads, block, dim = stored.shape
    word, flat = _word(name), stored.flatten(-2)
    keys = flat[:, 0].reshape(layers, heads, -1, dim // word, PIECE, word).transpose(3, 4)
    values = flat[:, 1].reshape(layers, heads, -1, PIECE // word, dim, word).transpose(4, 5)
    return torch.stack([part.reshape(layers, heads, block, dim) for part in (keys, values)], dim=1)


def _pieces(rows: torch.Tensor, name: str) -> torch.Tensor:
    """Order rows [layers, 2, kv_heads, block, head_dim] as native kernels do, within each head's numbers of a block."""
    layers, _, heads, block, dim = rows.shape
    word = _word(name)
    keys = rows[:, 0].reshape(layers, heads, -1, PIECE, dim // word, word).transpose(3, 4)
    values = rows[:, 1].reshape(layers, heads, -1, PIECE // word, word, dim).transpose(4, 5)
    return torch.stack([part.reshape(layers, heads, block, dim) for part in (keys, values)], dim=1)
