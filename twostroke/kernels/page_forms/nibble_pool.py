"""Pages of 4-bit numbers: keys scaled per channel over a block, values per token and group of channels (KIVI, arXiv
2402.02750, with groups of a block's 16 tokens).

A number n of 0..15 stands for center + scale * (n - 7.5). `native/nibbles.h` describes the same bytes; there is one
order for native kernels and torch. Each step of the arithmetic is one rounding, so that all write the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from twostroke.kernels.page_forms.exact_pages import ExactPages
from twostroke.kv_cache.form import FORMS
from twostroke.page_forms.int4 import BLOCK, PER_WORD, VALUE_GROUP, check_shape
from twostroke.page_forms.page_form import PageForm, PageShape

LARGEST_HALF: Final = 65504.0
SMALLEST_SCALE: Final = 2.0**-24
"""The smallest float16. Below it the scale is 0, since the numbers are nearly equal."""


@dataclass(frozen=True, slots=True, eq=False)
class NibblePool:
    """Views of pages of 4-bit numbers, and the exact pages of blocks that are not full."""

    form: PageForm
    heads: torch.Tensor
    """uint8 [pages, layers, kv_heads, bytes of a head's block]"""
    head_dim: int
    exact: ExactPages

    @classmethod
    def over(
        cls, data: torch.Tensor, shape: PageShape, dtype: torch.dtype, exact: ExactPages | None = None
    ) -> NibblePool:
        """Returns a pool of views of `data`, uint8 [pages, page bytes], whose rows may be parts of longer ones.

        The exact pages are by default in sparse host memory. Raises ConfigError for shapes that have no words.
        """
        check_shape(shape)
        exact = exact or ExactPages.sparse(len(data), shape, dtype)
        form = FORMS["int4"]
        heads = data.view(len(data), shape.layers, shape.kv_heads, form.head_bytes(shape))
        return cls(form, heads, shape.head_dim, exact)

    @property
    def layers(self) -> int:
        return self.heads.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.heads.shape[2]

    @property
    def block(self) -> int:
        return BLOCK

    @property
    def rope_dim(self) -> int:
        """Numbers of a query and a key that are rotated, which are all."""
        return self.head_dim

    @property
    def latent_dim(self) -> None:
        """Pages of latents are not of this form."""
        return None

    @property
    def device(self) -> torch.device:
        return self.heads.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the exact pages, which is that of queries."""
        return self.exact.pool.dtype

    def read(self, pages: torch.Tensor, layer: int) -> torch.Tensor:
        """Returns what the pages [n] store, float32 [n, 2, kv_heads, block, D]."""
        return unpacked(self.heads[pages, layer], self.head_dim).movedim(-3, 1)

    def store(self, pages: torch.Tensor, layer: int, rows: torch.Tensor) -> None:
        """Stores whole blocks: rows [n, 2, kv_heads, block, D] of any float dtype."""
        self.heads[pages, layer] = packed(rows.movedim(1, -3))


def packed(rows: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of heads' blocks, uint8 [..., bytes], from keys and values [..., 2, block, D]."""
    keys, values = rows.float().unbind(-3)
    dim = keys.shape[-1]
    key_numbers, key_scales, key_centers = _numbers(keys.mT)
    spare = -dim % VALUE_GROUP
    grouped = torch.unflatten(functional.pad(values, (0, spare)), -1, (-1, VALUE_GROUP))
    if spare:  # padding of the last group must not widen its range
        grouped[..., -1, VALUE_GROUP - spare :] = grouped[..., -1, :1]
    value_numbers, value_scales, value_centers = _numbers(grouped)
    value_numbers = value_numbers.flatten(-2)[..., :dim]
    parts = (
        _words(torch.unflatten(key_numbers.mT, -1, (-1, PER_WORD)).transpose(-3, -2)),
        key_scales,
        key_centers,
        _words(torch.unflatten(value_numbers, -2, (-1, PER_WORD)).mT),
        value_scales.mT,
        value_centers.mT,
    )
    flat = [_viewed(part, torch.uint8).flatten(keys.dim() - 2) for part in parts]
    return torch.cat(flat, dim=-1)


def unpacked(heads: torch.Tensor, dim: int) -> torch.Tensor:
    """Reverses `packed`: returns the numbers that the bytes of heads' blocks stand for, float32 [..., 2, block, D]."""
    groups = -(-dim // VALUE_GROUP)
    sizes = [BLOCK * dim // 2, 2 * dim, 2 * dim, BLOCK * dim // 2, 2 * groups * BLOCK, 2 * groups * BLOCK]
    kinds = [torch.int32, torch.float16, torch.float16] * 2
    parts = [
        _viewed(part, kind) for part, kind in zip(torch.split_with_sizes(heads, sizes, dim=-1), kinds, strict=True)
    ]
    keys = _unfold(torch.unflatten(parts[0], -1, (-1, BLOCK))).transpose(-3, -2).flatten(-2)
    keys = keys * parts[1].float()[..., None, :] + parts[2].float()[..., None, :]
    values = _unfold(torch.unflatten(parts[3], -1, (-1, dim))).mT.flatten(-3, -2)
    scale, center = (torch.unflatten(part.float(), -1, (groups, BLOCK)).mT for part in parts[4:])
    spread = [each.repeat_interleave(VALUE_GROUP, dim=-1)[..., :dim] for each in (scale, center)]
    return torch.stack((keys, values * spread[0] + spread[1]), dim=-3)


def _numbers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns numbers, int64 like x [..., n], and scales and centers, float16 [...], over the last dimension."""
    lowest, highest = x.amin(-1), x.amax(-1)
    fifteen = torch.full_like(lowest, 15.0)  # by a scalar, torch would multiply with the inverse
    scale = ((highest - lowest) / fifteen).clamp(-LARGEST_HALF, LARGEST_HALF).half()
    center = ((highest + lowest) * 0.5).clamp(-LARGEST_HALF, LARGEST_HALF).half()
    wide = scale.float()
    inverse = torch.where(wide < SMALLEST_SCALE, 0.0, torch.ones_like(wide) / wide)
    moved = (x - center.float()[..., None]) * inverse[..., None] + 7.5
    return moved.clamp(0, 15).round().long(), scale, center


def _viewed(part: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Returns the same bytes as another dtype, also for empty tensors."""
    return part.clone(memory_format=torch.contiguous_format).view(kind)


def _shifts(device: torch.device) -> torch.Tensor:
    """Returns the shifts of the eight numbers of a word: even ones in its lower half, odd ones in its upper half."""
    each = torch.arange(PER_WORD, device=device)
    return each % 2 * 16 + each // 2 * 4


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Returns words, int32 [...], of numbers [..., 8]."""
    words = (numbers << _shifts(numbers.device)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _unfold(words: torch.Tensor) -> torch.Tensor:
    """Returns n - 7.5 of the eight numbers of each word [...], float32 [..., 8]."""
    return ((words[..., None] >> _shifts(words.device)) & 15).float() - 7.5
