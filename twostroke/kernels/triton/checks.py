"""Checks what every kernel here assumes of its tensors, before it is launched."""

from __future__ import annotations

from typing import Any, Final

import torch

from twostroke.kernels.attention.spans import FIELDS, Spans, TokenSlots
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.triton.bytes import kind_of

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
WIDEST_HEAD: Final = 256


def check_pool(pool: PagePool, layer: int) -> None:
    """Checks that a page is contiguous, or has numbers and scales as `PagePool.over` lays them out. Pages may have any
    stride."""
    numbers = pool.numbers
    assert numbers.ndim == 6, f"pool must be [pages, layers, 2, kv_heads, block, head_dim], got {tuple(numbers.shape)}"
    _, layers, pair, _, block, dim = numbers.shape
    assert pair == 2, f"dimension 2 of the pool holds K and V, got {pair}"
    assert block.bit_count() == 1, f"tokens per block must be a power of two, got {block}"
    assert dim % 8 == 0, f"head_dim must be a multiple of 8, got {dim}"
    assert dim <= WIDEST_HEAD, f"head_dim must be at most {WIDEST_HEAD}, got {dim}"
    assert numbers.stride()[4:] == (dim, 1), f"numbers of a head must lie side by side, got {numbers.stride()}"
    assert 0 <= layer < layers, f"layer {layer} is not one of {layers}"


def check_heads(name: str, x: torch.Tensor, pool: PagePool, dtype: torch.dtype, heads: int | None = None) -> None:
    """Checks x [T, heads, head_dim] in `dtype`: heads lie side by side, and rows may have any stride."""
    kv_heads, dim = pool.kv_heads, pool.head_dim
    assert x.ndim == 3, f"{name} must be [T, heads, head_dim], got {tuple(x.shape)}"
    assert x.shape[2] == dim, f"head_dim of {name} must be the pool's {dim}, got {x.shape[2]}"
    assert dtype in DTYPES, f"{name} must be one of {DTYPES}, got {dtype}"
    assert x.dtype == dtype, f"{name} must be in the queries' {dtype}, got {x.dtype}"
    assert x.device == pool.device, f"{name} must lie on {pool.device}, got {x.device}"
    assert x.shape[1] % kv_heads == 0, f"heads of {name} must be a multiple of {kv_heads} kv_heads, got {x.shape[1]}"
    assert heads is None or x.shape[1] == heads, f"{name} must have {heads} heads, got {x.shape[1]}"
    assert x.stride()[1:] == (dim, 1) or x.shape[1] == 1, f"heads of {name} must lie side by side, got {x.stride()}"


def check_spans(spans: Spans, pool: PagePool) -> None:
    fields, tables = spans.fields, spans.block_tables
    assert fields.ndim == 2, f"span fields must be [spans, {FIELDS}], got {tuple(fields.shape)}"
    assert fields.shape[1] == FIELDS, f"span fields must be [spans, {FIELDS}], got {tuple(fields.shape)}"
    assert fields.is_contiguous(), f"span fields must be contiguous, got strides {fields.stride()}"
    assert tables.ndim == 2, f"block tables must be [sequences, widest], got {tuple(tables.shape)}"
    assert tables.stride(1) == 1 or tables.shape[1] <= 1, "a row of the block tables must be contiguous"
    for name, tensor in (("span fields", fields), ("block tables", tables)):
        assert tensor.dtype == torch.int32, f"{name} must be int32, got {tensor.dtype}"
        assert tensor.device == pool.device, f"{name} must lie on {pool.device}, got {tensor.device}"
    most = tables.shape[1] * pool.block
    assert spans.longest_context <= most, f"a context of {spans.longest_context} does not fit {most} tokens of pages"


def check_sinks(sinks: torch.Tensor | None, q: torch.Tensor) -> None:
    if sinks is None:
        return
    assert sinks.shape == q.shape[1:2], f"sinks must be [{q.shape[1]}], got {tuple(sinks.shape)}"
    assert sinks.dtype == torch.float32, f"sinks must be float32, got {sinks.dtype}"
    assert sinks.is_contiguous(), f"sinks must be contiguous, got strides {sinks.stride()}"
    assert sinks.device == q.device, f"sinks must lie on {q.device}, got {sinks.device}"


def check_placement(placement: TokenSlots, tokens: int, pool: PagePool, rope: int = 0) -> None:
    half = pool.head_dim // 2
    ropes = max(1, placement.cosines.shape[-1] // half)
    assert 0 <= rope < ropes, f"rope {rope} is not one of {ropes}"
    wanted = (
        ("write_slots", placement.write_slots, (tokens,), torch.int64),
        ("cosines", placement.cosines, (tokens, ropes * half), torch.float32),
        ("sines", placement.sines, (tokens, ropes * half), torch.float32),
    )
    for name, tensor, shape, dtype in wanted:
        assert tensor.shape == shape, f"{name} must be {shape}, got {tuple(tensor.shape)}"
        assert tensor.dtype == dtype, f"{name} must be {dtype}, got {tensor.dtype}"
        assert tensor.is_contiguous(), f"{name} must be contiguous, got strides {tensor.stride()}"
        assert tensor.device == pool.device, f"{name} must lie on {pool.device}, got {tensor.device}"


def pool_arguments(pool: PagePool) -> dict[str, Any]:
    """Returns the arguments of kernels about a pool, besides the addresses: strides in numbers, and the kind of
    numbers.

    A kernel of numbers with scales finds these at a quarter of the strides, since a scale has four bytes.
    """
    _, layer, value, head, *_ = pool.numbers.stride()
    return {"LAYER": layer, "VALUES": value, "HEAD": head, "BLOCK": pool.block, "KIND": kind_of(pool.form.name)}


def centers_of(pool: PagePool) -> torch.Tensor:
    """Returns the centers of keys, or an empty tensor for a kernel that uses none."""
    return torch.empty(0, device=pool.device) if pool.key_centers is None else pool.key_centers


def sinks_of(sinks: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor:
    """Returns the sinks, or an empty tensor for a kernel that uses none."""
    return torch.empty(0, device=q.device) if sinks is None else sinks


def scales_of(pool: PagePool) -> torch.Tensor:
    """Returns the scales, or an empty tensor for a kernel that uses none."""
    return torch.empty(0, device=pool.device) if pool.scales is None else pool.scales
