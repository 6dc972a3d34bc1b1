"""The interface of the kernels of a page form. Each form names a module whose `KERNELS` implements it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, cast

import torch

from twostroke.kernels.attention.interface import AttentionBackend, RaggedBatch
from twostroke.kernels.attention.rules import AnyRules
from twostroke.kernels.cpu.native_step import NativeStep
from twostroke.kernels.page_forms.exact_pages import ExactPages
from twostroke.kernels.pools.parted_pool import RecordedAttention, UniformPool
from twostroke.page_forms.page_form import PageForm, PagePart


class ConvertiblePage(Protocol):
    """One page, or a part of its layers, as rows [layers, 2, kv_heads, block, head_dim]."""

    def read(self, layers: slice) -> torch.Tensor:
        """Returns what attention reads, as float32 or in the dtype of a plain form."""

    def write(self, layers: slice, heads: slice, rows: torch.Tensor) -> None:
        """Stores rows of some layers and heads as the kernels of this form do."""

    def parts(self, layers: slice, heads: slice) -> list[torch.Tensor]:
        """Returns views of the stored numbers, and of scales if there are any."""


class FormKernels(Protocol):
    """Makes the pools of a form, and chooses the attention over them."""

    def pool_over(
        self,
        data: torch.Tensor,
        part: PagePart,
        dtype: torch.dtype,
        key_centers: torch.Tensor | None,
        exact_pages: Callable[[], ExactPages],
    ) -> UniformPool:
        """Returns a pool over uint8 [pages, bytes of the part], for a model that computes in `dtype`.

        `exact_pages` makes the exact pages of forms that have any. Raises ConfigError for shapes that the form cannot
        store.
        """

    def torch_attention(
        self, pool: UniformPool, heads: int, rules: AnyRules, *, is_deterministic: bool
    ) -> AttentionBackend:
        """Returns attention in plain torch over such a pool."""

    def triton_attention(
        self, pool: UniformPool, heads: int, rules: AnyRules, dtype: torch.dtype, *, has_sinks: bool
    ) -> RecordedAttention:
        """Returns attention on a CUDA device, ready to run. Raises ConfigError where there is none for the form."""

    def point(self, step: NativeStep, pool: UniformPool, batch: RaggedBatch) -> None:
        """Sets the addresses and strides of pages in a native step. Only forms of the native kernels need it."""

    def page_over(
        self, data: torch.Tensor, part: PagePart, key_centers: torch.Tensor | None, *, has_pieces: bool
    ) -> ConvertiblePage:
        """Returns a page, or a part of one, over uint8 [bytes of the part]. `has_pieces`: whether it is in native
        order.

        Raises ConfigError for shapes that the form cannot store.
        """


def kernels_of(form: PageForm) -> FormKernels:
    """Returns the kernels of a form. Their module is loaded when they are first asked for."""
    return cast("FormKernels", importlib.import_module(form.kernels).KERNELS)
