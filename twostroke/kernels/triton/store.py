"""Applies rope to q and k, and stores k and v into their slots of the pages: one launch per layer."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.kernels.attention.spans import TokenSlots
from twostroke.kernels.pools.page_pool import LARGEST, PagePool
from twostroke.kernels.triton.bytes import encoded, scale_of, size_bits
from twostroke.kernels.triton.checks import (
    centers_of,
    check_heads,
    check_placement,
    check_pool,
    pool_arguments,
    scales_of,
)

TOKENS: Final = 4
"""Tokens per program. A batch of 64 still gives every multiprocessor a program."""


def rotate_and_store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: PagePool, layer: int, placement: TokenSlots, rope: int = 0
) -> torch.Tensor:
    """Writes the rotated k, and v, both [T, kv_heads, D], into their slots. Returns the rotated q [T, heads, D],
    contiguous.

    `rope` is the index of the rope that rotates them.
    """
    check_pool(pool, layer)
    kv_heads, dim = pool.kv_heads, pool.head_dim
    check_heads("q", q, pool, q.dtype)
    check_heads("k", k, pool, q.dtype, kv_heads)
    check_heads("v", v, pool, q.dtype, kv_heads)
    check_placement(placement, len(q), pool, rope)
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // kv_heads
    store_kernel[(kv_heads, triton.cdiv(len(q), TOKENS))](
        q, k, v, rotated, pool.numbers, scales_of(pool), centers_of(pool),
        placement.write_slots, placement.cosines, placement.sines,
        q.stride(0), k.stride(0), v.stride(0), pool.numbers.stride(0),
        placement.cosines.shape[1], rope * dim // 2, layer, len(q),
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), HALF=dim // 2,
        HALF_PAD=triton.next_power_of_2(dim // 2), TOKENS=TOKENS, LARGEST=LARGEST.get(pool.form.name, 0.0),
        IS_CENTERED=pool.key_centers is not None,
        **pool_arguments(pool), num_warps=4, enable_fp_fusion=pool.scales is None,
    )  # fmt: skip
    return rotated


@triton.jit(do_not_specialize=["rope_at", "layer", "count"], do_not_specialize_on_alignment=["write_slots"])
def store_kernel(
    q, k, v, rotated, pool, scales, centers, write_slots, cosines, sines,
    q_stride, k_stride, v_stride, page_stride, angle_stride, rope_at, layer, count,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, TOKENS: tl.constexpr, LARGEST: tl.constexpr, IS_CENTERED: tl.constexpr,
    LAYER: tl.constexpr, VALUES: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = 2 * HALF
    kv_head = tl.program_id(0)
    half = tl.arange(0, HALF_PAD)
    inside = half < HALF

    # q: all query heads of this K/V head, of TOKENS tokens
    line = tl.arange(0, TOKENS * GROUP_PAD)
    token = tl.program_id(1) * TOKENS + line // GROUP_PAD
    in_group = line % GROUP_PAD
    asked = ((in_group < GROUP) & (token < count))[:, None] & inside[None, :]
    row = token.to(tl.int64)
    # angles: token, rope, half
    angle_at = (row * angle_stride + rope_at)[:, None] + half[None, :]
    cosine = tl.load(cosines + angle_at, mask=asked, other=0.0)
    sine = tl.load(sines + angle_at, mask=asked, other=0.0)
    head_at = (kv_head * GROUP + in_group) * DIM
    # q: token, head, lower half of d; the upper half HALF further
    q_at = q + (row * q_stride + head_at)[:, None] + half[None, :]
    low = tl.load(q_at, mask=asked, other=0.0).to(tl.float32)
    high = tl.load(q_at + HALF, mask=asked, other=0.0).to(tl.float32)
    # rotated: as q, rows side by side
    rotated_at = rotated + (row * (KV_HEADS * GROUP * DIM) + head_at)[:, None] + half[None, :]
    tl.store(rotated_at, (low * cosine - high * sine).to(q.dtype.element_ty), mask=asked)
    tl.store(rotated_at + HALF, (high * cosine + low * sine).to(q.dtype.element_ty), mask=asked)

    # k and v: this K/V head of TOKENS tokens
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = token.to(tl.int64)
    asked = (token < count)[:, None] & inside[None, :]
    # angles: token, rope, half
    angle_at = (row * angle_stride + rope_at)[:, None] + half[None, :]
    cosine = tl.load(cosines + angle_at, mask=asked, other=0.0)
    sine = tl.load(sines + angle_at, mask=asked, other=0.0)
    slot = tl.load(write_slots + row, mask=token < count, other=0)
    # K in the pool: page, layer, head, offset in the block, d; V VALUES further
    place = slot // BLOCK * page_stride + layer.to(tl.int64) * LAYER + kv_head * HEAD
    key_at = pool + (place + slot % BLOCK * DIM)[:, None] + half[None, :]
    # scales: of the same head, a float for each token
    scale_at = scales + place // 4 + slot % BLOCK
    # k: token, head, lower half of d
    k_at = k + (row * k_stride + kv_head * DIM)[:, None] + half[None, :]
    low = tl.load(k_at, mask=asked, other=0.0).to(tl.float32)
    high = tl.load(k_at + HALF, mask=asked, other=0.0).to(tl.float32)
    key_low = (low * cosine - high * sine).to(k.dtype.element_ty)
    key_high = (high * cosine + low * sine).to(k.dtype.element_ty)
    if IS_CENTERED:
        # centers: layer, head, lower half of d
        center_at = centers + (layer.to(tl.int64) * KV_HEADS + kv_head) * DIM + half
        key_low = key_low.to(tl.float32) - tl.load(center_at, mask=inside, other=0.0)[None, :]
        key_high = key_high.to(tl.float32) - tl.load(center_at + HALF, mask=inside, other=0.0)[None, :]
    put_halves(key_at, scale_at, key_low, key_high, asked, token < count, HALF, KIND, LARGEST)
    # v: as k
    v_at = v + (row * v_stride + kv_head * DIM)[:, None] + half[None, :]
    low = tl.load(v_at, mask=asked, other=0.0)
    high = tl.load(v_at + HALF, mask=asked, other=0.0)
    put_halves(key_at + VALUES, scale_at + VALUES // 4, low, high, asked, token < count, HALF, KIND, LARGEST)


@triton.jit
def put_halves(
    at, scale_at, low, high, asked, is_token, HALF: tl.constexpr, KIND: tl.constexpr, LARGEST: tl.constexpr
):  # fmt: skip
    """Stores the halves of rows into their slots, as numbers of the pool, and the scale of each row if there is one."""
    if KIND == 0:
        tl.store(at, low.to(at.dtype.element_ty), mask=asked)
        tl.store(at + HALF, high.to(at.dtype.element_ty), mask=asked)
    else:
        low, high = low.to(tl.float32), high.to(tl.float32)
        scale, inverse = scale_of(tl.maximum(tl.max(size_bits(low), 1), tl.max(size_bits(high), 1)), LARGEST)
        tl.store(scale_at, scale, mask=is_token)
        tl.store(at, encoded(low * inverse[:, None], KIND), mask=asked)
        tl.store(at + HALF, encoded(high * inverse[:, None], KIND), mask=asked)
