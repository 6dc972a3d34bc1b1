"""What this machine can do at most, as measured now: reading memory, and multiplying matrices."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.bench.kernels.timing import Limits, timed
from twostroke.kernels.linear import make_linear

BUFFER_BYTES = 512 << 20
"""Far more than caches hold."""
READS_PER_REPEAT = 4
"""A read takes milliseconds and suffers most from whoever else uses the memory: more of them find the limit."""
SHAPES = ((512, 576, 3072), (1024, 1024, 1024), (2048, 2048, 2048))
"""Rows, inputs, outputs: which is fastest differs between machines."""


def measured_limits(threads: int, dtype: torch.dtype, repeats: int) -> Limits:
    return Limits(
        threads, _read_rate(threads, BUFFER_BYTES, READS_PER_REPEAT * repeats), _matmul_rate(threads, dtype, repeats)
    )


def _read_rate(threads: int, buffer_bytes: int, repeats: int) -> float:
    """The better of a sum and of the C library's comparison, which lets go of the GIL: machines differ."""
    torch.set_num_threads(threads)
    ours = torch.rand(buffer_bytes // 8)  # of all different numbers: a hypervisor may merge pages that are equal
    theirs = ours.clone()
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    part = ours.nbytes // threads

    def read(thread: int) -> None:
        assert compare(ours.data_ptr() + thread * part, theirs.data_ptr() + thread * part, part) == 0

    with ThreadPoolExecutor(threads) as pool:
        compared = timed(lambda: list(pool.map(read, range(threads))), repeats)
    summed = timed(ours.sum, repeats)
    return max(2 * ours.nbytes / compared.least_s, ours.nbytes / summed.least_s)


def _matmul_rate(threads: int, dtype: torch.dtype, repeats: int) -> float:
    torch.set_num_threads(threads)
    rates = []
    with torch.inference_mode():
        for rows, inputs, outputs in SHAPES:
            x = torch.randn(rows, inputs).to(dtype)
            product = make_linear(torch.randn(outputs, inputs).to(dtype))
            best = timed(lambda x=x, product=product: product(x), repeats)  # type: ignore[misc]  # bound now, not later
            rates.append(2 * rows * inputs * outputs / best.least_s)
    return max(rates)
