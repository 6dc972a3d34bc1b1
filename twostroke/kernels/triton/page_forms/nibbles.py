"""4-bit pages on a CUDA device: stores whole blocks, and loads tiles of them.

`kernels/page_forms/nibble_pool.py` and `cpu/native/nibbles.h` describe the bytes. Storing does the same single
roundings as they do, so that all write the same bits. Words and scales are views of the same memory: int32 and float16.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from twostroke.kernels.attention.spans import TokenSlots
from twostroke.kernels.page_forms.nibble_pool import LARGEST_HALF, SMALLEST_SCALE, NibblePool
from twostroke.kernels.triton.checks import check_placement, pool_arguments
from twostroke.kernels.triton.store import rotate_and_store
from twostroke.page_forms.int4 import VALUE_GROUP

LEAST_DIM: Final = 16
"""The least width of a matrix operand on a device."""


def dims_of(pool: NibblePool) -> dict[str, int]:
    """Returns the arguments of kernels about a head: its width, and its padded width."""
    padded = max(LEAST_DIM, triton.next_power_of_2(pool.head_dim))
    return {"DIM": pool.head_dim, "DIM_PAD": padded, "WIDTH": min(VALUE_GROUP, padded)}


def exact_arguments(pool: NibblePool) -> dict[str, Any]:
    """Returns the arguments of kernels about the exact pages, besides the addresses: strides in numbers."""
    arguments = pool_arguments(pool.exact.pool)
    return {f"EXACT_{name}": arguments[name] for name in ("LAYER", "VALUES", "HEAD")}


def rotate_and_store_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: NibblePool,
    layer: int,
    placement: TokenSlots,
    rope: int = 0,
) -> torch.Tensor:
    """Writes the rotated k, and v, into their exact slots, and full blocks into their pages. Returns the rotated q [T,
    heads, D], contiguous.

    A block is full when the step has its last token. Each token's `write_slots` has the page.
    """
    exact_slots = placement.exact_slots
    assert exact_slots is not None, "tokens of 4-bit pages have exact slots"
    check_placement(placement, len(q), pool.exact.pool, rope)
    exact = TokenSlots(exact_slots, placement.cosines, placement.sines)
    rotated = rotate_and_store(q, k, v, pool.exact.pool, layer, exact, rope)
    words, halves, numbers = pool.heads.view(torch.int32), pool.heads.view(torch.float16), pool.exact.pool.numbers
    store_blocks_kernel[(pool.kv_heads, len(q))](
        words, halves, numbers, placement.write_slots, exact_slots,
        words.stride(0), numbers.stride(0), layer, pool.heads.stride(1) // 4, pool.heads.stride(2) // 4,
        **dims_of(pool), **exact_arguments(pool), LARGEST=LARGEST_HALF, SMALLEST=SMALLEST_SCALE,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return rotated


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["write_slots", "exact_slots"])
def store_blocks_kernel(
    words, halves, exact, write_slots, exact_slots,
    page_stride, exact_stride, layer, layer_stride, head_stride,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, WIDTH: tl.constexpr,
    EXACT_LAYER: tl.constexpr, EXACT_VALUES: tl.constexpr, EXACT_HEAD: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Stores the block that a token completes, in one head. Programs of other tokens end at once."""
    kv_head, token = tl.program_id(0), tl.program_id(1)
    exact_slot = tl.load(exact_slots + token)
    if exact_slot % 16 != 15:
        return

    page = tl.load(write_slots + token) // 16
    # words: page, layer, head
    place = page * page_stride + layer.to(tl.int64) * layer_stride + kv_head * head_stride
    offset = tl.arange(0, 16)
    d = tl.arange(0, DIM_PAD)
    inside = (d < DIM)[None, :]
    # exact K: slot, layer, head, offset in the block, d; V EXACT_VALUES further
    exact_at = exact + exact_slot // 16 * exact_stride + layer.to(tl.int64) * EXACT_LAYER + kv_head * EXACT_HEAD
    key_at = exact_at + offset[:, None] * DIM + d[None, :]
    keys = tl.load(key_at, mask=inside, other=0.0).to(tl.float32)
    scale, center, inverse = scales_between(tl.min(keys, 0), tl.max(keys, 0), LARGEST, SMALLEST)
    numbers = number_of(keys, center[None, :], inverse[None, :])
    # K's words: eight channels, offset in the block; then a scale of each channel, then its center
    eight = tl.arange(0, DIM_PAD // 8)
    word_at = words + place + eight[None, :] * 16 + offset[:, None]
    numbers = tl.reshape(numbers, [16, DIM_PAD // 8, 8])
    tl.store(word_at, tl.sum(numbers << shifts()[None, None, :], 2), mask=(eight < DIM // 8)[None, :])
    scale_at = halves + place * 2 + 4 * DIM + d
    tl.store(scale_at, scale, mask=d < DIM)
    tl.store(scale_at + DIM, center, mask=d < DIM)

    values = tl.load(key_at + EXACT_VALUES, mask=inside, other=0.0).to(tl.float32)
    group = tl.arange(0, DIM_PAD // WIDTH)
    grouped = tl.reshape(values, [16, DIM_PAD // WIDTH, WIDTH])
    is_there = (group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :] < DIM)[None, :, :]
    # padding of the last group does not widen its range; groups of only padding have none
    begun = (group * WIDTH < DIM)[None, :]
    lowest = tl.where(begun, tl.min(tl.where(is_there, grouped, float("inf")), 2), 0.0)
    highest = tl.where(begun, tl.max(tl.where(is_there, grouped, float("-inf")), 2), 0.0)
    scale, center, inverse = scales_between(lowest, highest, LARGEST, SMALLEST)
    numbers = number_of(grouped, center[:, :, None], inverse[:, :, None])
    numbers = tl.reshape(numbers, [2, 8, DIM_PAD])
    # V's words: eight tokens, channel; then scales by group and offset in the block, then centers
    place += 3 * DIM
    half = tl.arange(0, 2)
    word_at = words + place + half[:, None] * DIM + d[None, :]
    tl.store(word_at, tl.sum(numbers << shifts()[None, :, None], 1), mask=inside)
    scale_at = halves + (place + 2 * DIM) * 2 + group[None, :] * 16 + offset[:, None]
    tl.store(scale_at, scale, mask=begun)
    tl.store(scale_at + (DIM + WIDTH - 1) // WIDTH * 16, center, mask=begun)


@triton.jit
def shifts():
    """Returns the shifts of the eight numbers of a word: even ones in its lower half, odd ones in its upper half."""
    each = tl.arange(0, 8)
    return each % 2 * 16 + each // 2 * 4


@triton.jit
def scales_between(lowest, highest, LARGEST: tl.constexpr, SMALLEST: tl.constexpr):
    """Returns scale and center as float16, and the inverse of the scale as float32: 0 where there is no spread."""
    step = tl.div_rn(highest - lowest, tl.full(lowest.shape, 15.0, tl.float32))
    scale = tl.minimum(tl.maximum(step, -LARGEST), LARGEST).to(tl.float16)
    center = tl.minimum(tl.maximum((highest + lowest) * 0.5, -LARGEST), LARGEST).to(tl.float16)
    wide = scale.to(tl.float32)
    is_flat = wide < SMALLEST
    one = tl.full(wide.shape, 1.0, tl.float32)
    return scale, center, tl.where(is_flat, 0.0, tl.div_rn(one, tl.where(is_flat, 1.0, wide)))


@triton.jit
def number_of(x, center, inverse):
    """Returns the number 0..15, rounded to nearest, ties to even, as int32."""
    moved = (x - center.to(tl.float32)) * inverse + 7.5
    bounded = tl.minimum(tl.maximum(moved, 0.0), 15.0)
    magic = tl.full(x.shape, 12582912.0, tl.float32)
    return (bounded + magic).to(tl.int32, bitcast=True) - magic.to(tl.int32, bitcast=True)


@triton.jit
def stored_keys(
    words, halves, place, exists, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Returns the keys of the blocks at `place`, an offset in words: float32 [BLOCKS * 16, DIM_PAD]."""
    eight = tl.arange(0, DIM_PAD // 8)
    d = tl.arange(0, DIM_PAD)
    # K's words: block, offset in it, eight channels
    at = place[:, None, None] + tl.arange(0, 16)[None, :, None] + eight[None, None, :] * 16
    word = tl.load(words + at, mask=exists[:, None, None] & (eight < DIM // 8)[None, None, :], other=0)
    number = (word[:, :, :, None] >> shifts()[None, None, None, :]) & 15
    number = tl.reshape(number.to(tl.float32) - 7.5, [BLOCKS, 16, DIM_PAD])
    # scales: block, channel; centers DIM further
    scale_at = halves + (place * 2 + 4 * DIM)[:, None] + d[None, :]
    is_there = exists[:, None] & (d < DIM)[None, :]
    scale = tl.load(scale_at, mask=is_there, other=0.0).to(tl.float32)
    center = tl.load(scale_at + DIM, mask=is_there, other=0.0).to(tl.float32)
    return tl.reshape(number * scale[:, None, :] + center[:, None, :], [BLOCKS * 16, DIM_PAD])


@triton.jit
def stored_values(
    words, halves, place, exists, DIM: tl.constexpr, DIM_PAD: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Returns the values of the same blocks, in the same shape."""
    d = tl.arange(0, DIM_PAD)
    group = tl.arange(0, DIM_PAD // WIDTH)
    GROUPS: tl.constexpr = (DIM + WIDTH - 1) // WIDTH
    place += 3 * DIM
    # V's words: block, eight tokens, channel
    at = place[:, None, None] + tl.arange(0, 2)[None, :, None] * DIM + d[None, None, :]
    word = tl.load(words + at, mask=exists[:, None, None] & (d < DIM)[None, None, :], other=0)
    number = (word[:, :, None, :] >> shifts()[None, None, :, None]) & 15
    number = tl.reshape(number.to(tl.float32) - 7.5, [BLOCKS * 16, DIM_PAD // WIDTH, WIDTH])
    # scales: block, group, offset in the block; centers GROUPS further
    scale_at = (place * 2 + 4 * DIM)[:, None, None] + tl.arange(0, 16)[None, :, None] + group[None, None, :] * 16
    is_there = exists[:, None, None] & (group < GROUPS)[None, None, :]
    scale_at = tl.broadcast_to(scale_at, [BLOCKS, 16, DIM_PAD // WIDTH])
    scale = tl.load(halves + scale_at, mask=is_there, other=0.0).to(tl.float32)
    center = tl.load(halves + scale_at + GROUPS * 16, mask=is_there, other=0.0).to(tl.float32)
    scale = tl.reshape(scale, [BLOCKS * 16, DIM_PAD // WIDTH])
    center = tl.reshape(center, [BLOCKS * 16, DIM_PAD // WIDTH])
    return tl.reshape(number * scale[:, :, None] + center[:, :, None], [BLOCKS * 16, DIM_PAD])
