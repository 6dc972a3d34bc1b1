"""Measures the highest rates of a machine's processor: of reading memory, and of multiplying matrices."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch

from twostroke.kernels.products.linear import make_linear

READS_PER_REPEAT: Final = 4
"""Reads for each repeat. A read takes milliseconds and suffers most from other users of the memory, so more of them
find the limit."""
TRIAL_SHAPE: Final = (64, 576, 3072)
"""Rows, inputs, outputs of a product that shows which of two dtypes is faster here."""

Shape = tuple[int, int, int]
Run = Callable[[Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """The highest rates that were measured with a number of threads."""

    threads: int
    read_bytes_per_s: float
    operations_per_s: float
    """Rate of matrix products in the model's dtype or in float32. A multiplication and its addition count as two."""


def measured_limits(
    threads: int,
    dtype: torch.dtype,
    repeats: int,
    *,
    buffer_bytes: int,
    shapes: Sequence[Shape],
    run: Run | None = None,
) -> Limits:
    """Measures both rates. `run` runs each of the short timed calls, on any thread."""
    trial = _Trials(threads, repeats, run or (lambda call: call()))
    return Limits(threads, trial.read_rate(buffer_bytes), trial.product_rate(dtype, shapes))


@dataclass(frozen=True, slots=True)
class _Trials:
    threads: int
    repeats: int
    run: Run

    def read_rate(self, buffer_bytes: int) -> float:
        """Returns the better rate of a sum and of the C library's comparison, which releases the GIL. Machines differ
        in which is faster."""
        ours = torch.rand(buffer_bytes // 8)  # random, because a hypervisor may merge equal pages
        theirs = ours.clone()
        compare = ctypes.CDLL(None).memcmp
        compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        part = ours.nbytes // self.threads

        def read(thread: int) -> None:
            assert compare(ours.data_ptr() + thread * part, theirs.data_ptr() + thread * part, part) == 0

        with ThreadPoolExecutor(self.threads) as pool:
            each = range(self.threads)
            compared_s = self._least_s(lambda: list(pool.map(read, each)), READS_PER_REPEAT * self.repeats)
        summed_s = self._least_s(ours.sum, READS_PER_REPEAT * self.repeats)
        return max(2 * ours.nbytes / compared_s, ours.nbytes / summed_s)

    def product_rate(self, dtype: torch.dtype, shapes: Sequence[Shape]) -> float:
        """Returns the rate of matrix products. A processor without instructions for `dtype` multiplies float32
        faster."""
        rates = {kind: self._rate_of(kind, TRIAL_SHAPE) for kind in {dtype, torch.float32}}
        best = max(rates, key=lambda kind: rates[kind])
        return max(rates[best], *(self._rate_of(best, shape) for shape in shapes))

    def _rate_of(self, dtype: torch.dtype, shape: Shape) -> float:
        rows, inputs, outputs = shape
        x = torch.randn(rows, inputs).to(dtype)
        product = make_linear(torch.randn(outputs, inputs).to(dtype))
        return 2 * rows * inputs * outputs / self._least_s(lambda: product(x), self.repeats)

    def _least_s(self, call: Callable[[], object], repeats: int) -> float:
        """Returns the shortest time of some calls, in seconds. The first call does not count."""
        least_s = [float("inf")]

        def timed() -> None:
            before = torch.get_num_threads()
            torch.set_num_threads(self.threads)
            try:
                with torch.inference_mode():
                    started_s = time.perf_counter()
                    call()
                    least_s.append(time.perf_counter() - started_s)
            finally:
                torch.set_num_threads(before)

        for _ in range(repeats + 1):
            self.run(timed)
        return min(least_s[2:])
