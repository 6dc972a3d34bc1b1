"""The kernels of int4 pages, whose blocks are stored whole."""

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
from twostroke.kernels.page_forms.nibble_attention import NibbleAttention
from twostroke.kernels.page_forms.nibble_pool import NibblePool, packed, unpacked
from twostroke.kernels.pools.parted_pool import RecordedAttention, UniformPool
from twostroke.page_forms.page_form import PagePart


class NibbleKernels:
    """The kernels of int4 pages. Each page has its own centers, so those of the model are not used."""

    def pool_over(
        self,
        data: torch.Tensor,
        part: PagePart,
        dtype: torch.dtype,
        key_centers: torch.Tensor | None,
        exact_pages: Callable[[], ExactPages],
    ) -> NibblePool:
        """Raises ConfigError for shapes that have no words."""
        del key_centers
        return NibblePool.over(data, part.shape, dtype, exact_pages())

    def torch_attention(
        self, pool: UniformPool, heads: int, rules: AnyRules, *, is_deterministic: bool
    ) -> AttentionBackend:
        del is_deterministic  # rows are always computed in tiles of one block
        assert isinstance(pool, NibblePool)
        return NibbleAttention(pool, heads, rules)

    def triton_attention(
        self, pool: UniformPool, heads: int, rules: AnyRules, dtype: torch.dtype, *, has_sinks: bool
    ) -> RecordedAttention:
        """Returns attention on a CUDA device. Raises ConfigError for query heads that cannot share the pool's K/V
        heads."""
        from twostroke.kernels.triton.page_forms.nibble_attention import TritonNibbleAttention

        del dtype  # it is that of the exact pages
        assert isinstance(pool, NibblePool)
        attention = TritonNibbleAttention(pool, heads, rules, has_sinks=has_sinks)
        attention.warm_up()  # no request should wait for a compiler
        return attention

    def point(self, step: NativeStep, pool: UniformPool, batch: RaggedBatch) -> None:
        assert isinstance(pool, NibblePool)
        assert batch.exact_slots is not None
        step.pool = pool.heads.data_ptr()
        step.page_stride, step.layer_stride, step.head_stride, _ = pool.heads.stride()
        exact = pool.exact.pool
        step.exact_pool, step.exact_slots = exact.numbers.data_ptr(), batch.exact_slots.data_ptr()
        strides = exact.byte_strides
        step.exact_page_stride, step.exact_layer_stride, step.exact_value_offset, step.exact_head_stride = strides

    def page_over(
        self, data: torch.Tensor, part: PagePart, key_centers: torch.Tensor | None, *, has_pieces: bool
    ) -> NibblePage:
        """Raises ConfigError for shapes that have no words."""
        del key_centers, has_pieces
        part.form.check_shape(part.shape)
        return NibblePage(data.view(part.shape.layers, part.shape.kv_heads, -1), part.shape.head_dim)


@dataclass(frozen=True, slots=True)
class NibblePage:
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


KERNELS: Final[FormKernels] = NibbleKernels()
