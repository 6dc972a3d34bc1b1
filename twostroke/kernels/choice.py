"""Which attention serves a pool: decided once, when the pool is built."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import torch

from twostroke.errors import ConfigError
from twostroke.kernels.aligned_attention import AlignedAttention
from twostroke.kernels.attention import AttentionBackend
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.elementwise import Elementwise, TorchElementwise
from twostroke.kernels.nibble_attention import NibbleAttention
from twostroke.kernels.nibble_pool import NibblePool
from twostroke.kernels.page_pool import PagePool
from twostroke.kernels.torch_attention import TorchAttention
from twostroke.kv_cache.form import PageForm, PageShape

if TYPE_CHECKING:  # loads Triton
    from twostroke.kernels.triton.attention import TritonAttention
    from twostroke.kernels.triton.nibble_attention import TritonNibbleAttention


def host_pool(
    data: torch.Tensor,
    form: PageForm,
    shape: PageShape,
    dtype: torch.dtype,
    key_centers: torch.Tensor | None = None,
) -> PagePool | NibblePool:
    """Return the pool over `data`, uint8 [pages, page bytes] in host memory, of a model that computes in `dtype`.

    `key_centers` are those of the model. Forms of 4 bits have centers of their own in each page.
    Raises ConfigError for a form that cannot store such heads or blocks.
    """
    if form.spans_block:
        return NibblePool.over(data, shape, dtype)
    return PagePool.over(data, form, shape, key_centers)


def choose_attention(
    pool: PagePool | NibblePool,
    *,
    heads: int,
    scale: float,
    kernels: Kernels | None,
    dtype: torch.dtype,
    team: Team | None = None,
    is_deterministic: bool = False,
) -> AttentionBackend:
    """For a pool in host memory: the native kernel where the CPU has one, on threads of `team`; else torch.

    `dtype` is that of queries, keys and values.
    """
    if kernels is not None:
        return NativeAttention(pool, heads, scale, kernels, team, dtype)
    if isinstance(pool, NibblePool):
        return NibbleAttention(pool, heads, scale)
    return AlignedAttention(pool, heads, scale) if is_deterministic else TorchAttention(pool, heads, scale)


def device_attention(
    pool: PagePool | NibblePool, *, heads: int, scale: float, dtype: torch.dtype
) -> TritonAttention | TritonNibbleAttention:
    """For a pool on a CUDA device. Raises ConfigError where Triton is missing, or cannot compute such heads."""
    _require_triton()  # only here: a machine without CUDA need not have it
    from twostroke.kernels.triton.attention import TritonAttention
    from twostroke.kernels.triton.nibble_attention import TritonNibbleAttention

    attention: TritonAttention | TritonNibbleAttention
    if isinstance(pool, NibblePool):
        attention = TritonNibbleAttention(pool, heads, scale)
    else:
        attention = TritonAttention(pool, heads, scale, dtype)
    attention.warm_up()  # no request should wait for a compiler
    return attention


def device_elementwise(device: torch.device) -> Elementwise:
    if device.type != "cuda":
        return TorchElementwise()
    _require_triton()
    from twostroke.kernels.triton.elementwise import TritonElementwise

    return TritonElementwise()


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("--device cuda needs Triton: pip install 'triton>=3.6', or use --device cpu", field="device")
