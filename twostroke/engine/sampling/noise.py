"""Gumbel noise as a pure function of (seed, choice, position, token id): the reason a stream can move between workers.

Counter-based: SplitMix64's finaliser over a keyed counter, so any part of it can be computed anywhere, in any order.
"""

from __future__ import annotations

import torch

_GOLDEN = 0x9E3779B97F4A7C15
"""SplitMix64's increment."""
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_BELOW_ONE = 1 - 2.0**-24
"""The greatest float32 below 1. The largest 53-bit integers round to 1, and the noise of 1 would be minus infinity."""


def gumbel(seed: int, choice: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """Returns float32 Gumbel noise, always finite, for each id of `tokens` (int64): argmax(log p + noise)
    draws from p.
    """
    return _gumbel(tokens * _signed(_GOLDEN) + stream_of(seed, choice, position))


def gumbel_rows(streams: torch.Tensor, count: int) -> torch.Tensor:
    """Returns Gumbel noise [rows, count] for the ids below `count`, on the device of `streams` (int64 [rows], from
    `stream_of`).

    A device's logarithm may differ from the host's in the last bits; the numbers before it do not.
    """
    tokens = torch.arange(count, device=streams.device)
    return _gumbel((tokens * _signed(_GOLDEN))[None] + streams[:, None])


def stream_of(seed: int, choice: int, position: int) -> int:
    """Returns the start of a draw's counter, as an int64."""
    return _signed(_stream(seed, choice, position))


def _gumbel(h: torch.Tensor) -> torch.Tensor:
    """Returns the noise of counters, which it overwrites."""
    _mix_in_place(h)
    # 53 bits as float32 keep their relative precision near 0, which is the tail that wins an argmax.
    negative_uniform = _shift_right(h, 11).float().add_(0.5).mul_(-(2.0**-53)).clamp_(min=-_BELOW_ONE)
    return negative_uniform.log1p_().neg_().log_().neg_()


def _stream(seed: int, choice: int, position: int) -> int:
    state = _mix((seed + _GOLDEN) & _MASK)
    state = _mix((state ^ choice) + _GOLDEN & _MASK)
    return _mix((state ^ position) + _GOLDEN & _MASK)


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * _MIX_1 & _MASK
    z = (z ^ (z >> 27)) * _MIX_2 & _MASK
    return z ^ (z >> 31)


def _mix_in_place(h: torch.Tensor) -> None:
    """Applies `_mix` to int64 tensors. Their products wrap, and their right shift must be made logical."""
    h ^= _shift_right(h, 30)
    h *= _signed(_MIX_1)
    h ^= _shift_right(h, 27)
    h *= _signed(_MIX_2)
    h ^= _shift_right(h, 31)


def _shift_right(h: torch.Tensor, bits: int) -> torch.Tensor:
    return (h >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Returns the int64 with the bits of a uint64."""
    return value - (1 << 64) if value >> 63 else value
