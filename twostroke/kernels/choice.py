"""Chooses the kernels for a pool and a device, once, when they are made."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import torch

from twostroke.base.errors import ConfigError
from twostroke.kernels.attention.interface import AttentionBackend
from twostroke.kernels.attention.rules import AnyRules
from twostroke.kernels.cpu.attention import FORMS as NATIVE_FORMS
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.page_forms.exact_pages import ExactPages
from twostroke.kernels.page_forms.form_kernels import kernels_of
from twostroke.kernels.pools.parted_pool import (
    AnyPool,
    PartedAttention,
    PartedDeviceAttention,
    PartedPool,
    RecordedAttention,
    UniformPool,
    parts_of,
    rules_of_parts,
)
from twostroke.kernels.products.device_codes import CodeProducts, TorchCodeProducts
from twostroke.kernels.products.device_linear import DeviceLinears
from twostroke.kernels.products.elementwise import Elementwise, TorchElementwise
from twostroke.kernels.products.grouped import GroupedProducts, TorchGrouped
from twostroke.kernels.products.linear import Linears
from twostroke.kv_cache.form import AnyForm, check_latents
from twostroke.page_forms.page_form import PagePart, PageShape


def grouped_pool(
    regions: Sequence[torch.Tensor],
    form: AnyForm,
    shapes: Sequence[PageShape],
    dtype: torch.dtype,
    key_centers: torch.Tensor | None = None,
    exact_pages: Callable[[PageShape], ExactPages] | None = None,
) -> AnyPool:
    """Returns the pool of a model that computes in `dtype` over the pages of its groups, each uint8 [pages, page
    bytes].

    `key_centers` are those of the model. Forms of 4 bits have their own centers in each page.

    `exact_pages` makes the exact pages of forms that have any, by default in sparse host memory.

    Raises ConfigError for a form that cannot store such layers, heads or blocks.
    """
    check_latents(shapes[0], form)

    def over(data: torch.Tensor, part: PagePart, layers: Sequence[int]) -> UniformPool:
        def exact() -> ExactPages:
            if exact_pages is not None:
                return exact_pages(part.shape)
            return ExactPages.sparse(len(regions[0]), part.shape, dtype)

        centers = None if key_centers is None else key_centers[[*layers]]
        return kernels_of(part.form).pool_over(data[:, part.bytes], part, dtype, centers, exact)

    pools: list[UniformPool] = []
    layers_of_parts: list[tuple[int, ...]] = []
    groups_of_parts: list[int] = []
    for group, (data, shape) in enumerate(zip(regions, shapes, strict=True)):
        for part in form.parts(shape):
            layers_of_parts.append(shape.selected.indices[part.layers])
            groups_of_parts.append(group)
            pools.append(over(data, part, layers_of_parts[-1]))
    if len(pools) == 1:
        return pools[0]
    return PartedPool(tuple(pools), tuple(layers_of_parts), tuple(groups_of_parts))


def choose_attention(
    pool: AnyPool,
    *,
    heads: int,
    rules: AnyRules,
    kernels: Kernels | None,
    dtype: torch.dtype,
    team: Team | None = None,
    is_deterministic: bool = False,
) -> AttentionBackend:
    """Returns the attention for a pool in host memory: the native kernel on threads of `team`, or torch where there is
    no native kernel.

    `dtype` is that of queries, keys and values.
    """
    if kernels is not None and all(part.form.name in NATIVE_FORMS for part in parts_of(pool)):
        return NativeAttention(pool, heads, rules, kernels, team, dtype)
    backends = [
        kernels_of(part.form).torch_attention(part, heads, some, is_deterministic=is_deterministic)
        for part, some in zip(parts_of(pool), rules_of_parts(pool, rules), strict=True)
    ]
    return PartedAttention(pool, backends) if isinstance(pool, PartedPool) else backends[0]


def device_attention(
    pool: AnyPool, *, heads: int, rules: AnyRules, dtype: torch.dtype, has_sinks: bool = False
) -> RecordedAttention:
    """Returns the attention for a pool on a CUDA device. Raises ConfigError where Triton is missing, or cannot compute
    such heads.
    """
    _require_triton()  # only here, because machines without CUDA may lack it
    backends = [
        kernels_of(part.form).triton_attention(part, heads, some, dtype, has_sinks=has_sinks)
        for part, some in zip(parts_of(pool), rules_of_parts(pool, rules), strict=True)
    ]
    return PartedDeviceAttention(pool, backends) if isinstance(pool, PartedPool) else backends[0]


def device_elementwise(device: torch.device) -> Elementwise:
    if device.type != "cuda":
        return TorchElementwise()
    _require_triton()
    from twostroke.kernels.triton.elementwise import TritonElementwise

    return TritonElementwise()


def device_grouped(device: torch.device) -> GroupedProducts:
    if device.type != "cuda":
        return TorchGrouped()
    _require_triton()
    from twostroke.kernels.triton.grouped import TritonGrouped

    return TritonGrouped()


def device_linears(device: torch.device) -> Linears:
    """Returns the object that makes the matrix products of a model on this device."""
    codes: CodeProducts = TorchCodeProducts()
    if device.type == "cuda":
        _require_triton()
        from twostroke.kernels.triton.codes import TritonCodeProducts

        codes = TritonCodeProducts()
    return DeviceLinears(device, device_elementwise(device), codes)


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("--device cuda needs Triton: pip install 'triton>=3.6', or use --device cpu", field="device")
