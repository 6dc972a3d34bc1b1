"""Pools whose pages hold all layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from twostroke.kernels.choice import grouped_pool
from twostroke.kernels.page_forms.exact_pages import ExactPages
from twostroke.kernels.pools.parted_pool import AnyPool
from twostroke.kv_cache.form import AnyForm
from twostroke.page_forms.page_form import PageShape


def pool_over(
    data: torch.Tensor,
    form: AnyForm,
    shape: PageShape,
    dtype: torch.dtype,
    key_centers: torch.Tensor | None = None,
    exact_pages: Callable[[PageShape], ExactPages] | None = None,
) -> AnyPool:
    """Returns the pool over `data`, uint8 [pages, page bytes], whose pages hold all layers: see `grouped_pool`."""
    return grouped_pool((data,), form, (shape,), dtype, key_centers, exact_pages)
