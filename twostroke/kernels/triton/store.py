"""Rope on q and k, and k and v into their slots of the pages: one launch per layer."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.kernels.spans import TokenSlots
from twostroke.kernels.triton.checks import check_heads, check_placement, check_pool

TOKENS: Final = 4
"""Per program: a batch of 64 still gives every multiprocessor one."""


def rotate_and_store(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor, layer: int, placement: TokenSlots
) -> torch.Tensor:
    """The rotated q [T, heads, D], contiguous; k, rotated, and v [T, kv_heads, D] are in their slots."""
    check_pool(pool, layer)
    kv_heads, block, dim = pool.shape[3:]
    check_heads("q", q, pool)
    check_heads("k", k, pool, kv_heads)
    check_heads("v", v, pool, kv_heads)
    check_placement(placement, len(q), pool)
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // kv_heads
    store_kernel[(kv_heads, triton.cdiv(len(q), TOKENS))](
        q, k, v, rotated, pool, placement.write_slots, placement.cosines, placement.sines,
        q.stride(0), k.stride(0), v.stride(0), pool.stride(0), layer, len(q),
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=triton.next_power_of_2(group), HALF=dim // 2,
        HALF_PAD=triton.next_power_of_2(dim // 2), BLOCK=block, TOKENS=TOKENS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return rotated


@triton.jit(do_not_specialize=["layer", "count"], do_not_specialize_on_alignment=["write_slots"])
def store_kernel(
    q, k, v, rotated, pool, write_slots, cosines, sines,
    q_stride, k_stride, v_stride, page_stride, layer, count,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, HALF: tl.constexpr,
    HALF_PAD: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
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
    # angles: token, half
    angle_at = (row * HALF)[:, None] + half[None, :]
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
    # angles: token, half
    angle_at = (row * HALF)[:, None] + half[None, :]
    cosine = tl.load(cosines + angle_at, mask=asked, other=0.0)
    sine = tl.load(sines + angle_at, mask=asked, other=0.0)
    slot = tl.load(write_slots + row, mask=token < count, other=0)
    # K in the pool: page, layer, head, offset in the block, d; V all heads of K further
    place = slot // BLOCK * page_stride + layer.to(tl.int64) * (2 * KV_HEADS * BLOCK * DIM)
    key_at = pool + (place + kv_head * (BLOCK * DIM) + slot % BLOCK * DIM)[:, None] + half[None, :]
    value_at = key_at + KV_HEADS * BLOCK * DIM
    # k: token, head, lower half of d
    k_at = k + (row * k_stride + kv_head * DIM)[:, None] + half[None, :]
    low = tl.load(k_at, mask=asked, other=0.0).to(tl.float32)
    high = tl.load(k_at + HALF, mask=asked, other=0.0).to(tl.float32)
    tl.store(key_at, (low * cosine - high * sine).to(pool.dtype.element_ty), mask=asked)
    tl.store(key_at + HALF, (high * cosine + low * sine).to(pool.dtype.element_ty), mask=asked)
    # v: as k
    v_at = v + (row * v_stride + kv_head * DIM)[:, None] + half[None, :]
    tl.store(value_at, tl.load(v_at, mask=asked), mask=asked)
    tl.store(value_at + HALF, tl.load(v_at + HALF, mask=asked), mask=asked)
