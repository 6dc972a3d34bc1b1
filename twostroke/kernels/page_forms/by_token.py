"""The kernels of forms that store each token on its own: plain numbers, and numbers of a byte with a scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from twostroke.kernels.attention.interface import AttentionBackend, RaggedBatch
from twostroke.kernels.attention.rules import AnyRules
from twostroke.kernels.cpu.native_step import NativeStep
from twostroke.kernels.page_forms.exact_pages import ExactPages
from twostroke.kernels.page_forms.form_kernels import FormKernels
from twostroke.kernels.pools.page_pool import BYTES, PLAIN, PagePool, quantised
from twostroke.kernels.pools.parted_pool import RecordedAttention, UniformPool
from twostroke.kernels.torch_attention.aligned import AlignedAttention
from twostroke.kernels.torch_attention.gathered import TorchAttention
from twostroke.page_forms.page_form import PagePart

PIECE: Final = 16
"""Tokens of a piece: `PIECE` in native/page.h."""
IN_PAIRS: Final = frozenset({"bfloat16", *BYTES})
"""Formats of which one multiply-add takes a pair of numbers (`PER_WORD` in native/page.h). Of others it takes one
number."""


class TokenKernels:
    """The kernels of forms that store each token on its own. See `FormKernels` for the methods."""

    def pool_over(
        self,
        data: torch.Tensor,
        part: PagePart,
        dtype: torch.dtype,
        key_centers: torch.Tensor | None,
        exact_pages: Callable[[], ExactPages],
    ) -> PagePool:
        """Raises ConfigError where scales cannot be aligned."""
        del dtype, exact_pages  # pages hold every token as soon as it is computed
        return PagePool.over(data, part.form, part.shape, key_centers)

    def torch_attention(
        self, pool: UniformPool, heads: int, rules: AnyRules, *, is_deterministic: bool
    ) -> AttentionBackend:
        assert isinstance(pool, PagePool)
        return AlignedAttention(pool, heads, rules) if is_deterministic else TorchAttention(pool, heads, rules)

    def triton_attention(
        self, pool: UniformPool, heads: int, rules: AnyRules, dtype: torch.dtype, *, has_sinks: bool
    ) -> RecordedAttention:
        """Raises ConfigError for heads that the kernels cannot compute."""
        from twostroke.kernels.triton.attention import TritonAttention

        assert isinstance(pool, PagePool)
        attention = TritonAttention(pool, heads, rules, dtype, has_sinks=has_sinks)
        attention.warm_up()  # no request should wait for a compiler
        return attention

    def point(self, step: NativeStep, pool: UniformPool, batch: RaggedBatch) -> None:
        del batch
        assert isinstance(pool, PagePool)
        step.pool = pool.numbers.data_ptr()
        step.page_stride, step.layer_stride, step.value_offset, step.head_stride = pool.byte_strides
        step.latent_dim = pool.latent_dim or 0
        if pool.key_centers is not None:
            step.key_centers = pool.key_centers.data_ptr()

    def page_over(
        self, data: torch.Tensor, part: PagePart, key_centers: torch.Tensor | None, *, has_pieces: bool
    ) -> TokenPage:
        """Raises ConfigError where scales cannot be aligned."""
        return TokenPage(PagePool.over(data[None], part.form, part.shape, key_centers), has_pieces)


@dataclass(frozen=True, slots=True)
class TokenPage:
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
        """Returns float32 rows. The centers of keys are added this many times."""
        centers = self.page.key_centers
        if centers is None:
            return rows
        keys = rows[:, 0] + times * centers[layers, heads, None]
        return torch.stack((keys, rows[:, 1]), dim=1)


def _word(name: str) -> int:
    return 2 if name in IN_PAIRS else 1


def _rows(stored: torch.Tensor, name: str) -> torch.Tensor:
    """Reverses `_pieces`."""
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


KERNELS: Final[FormKernels] = TokenKernels()
