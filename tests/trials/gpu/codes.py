"""Products of codes: Triton's kernel against torch, rows alone against rows in company, and the time they take."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch
from torch.nn import functional

from tests.trials.gpu.kernels import WORST, relative_error
from tests.trials.gpu.measure import DEVICE, ON_GPU, replayed_ms
from tests.trials.gpu.report import Report, Row
from tests.unit.kernels.stored_matrices import FP8, LAYOUTS, stored
from twostroke.kernels.products.device_codes import DeviceMatrix, TorchCodeProducts
from twostroke.kernels.triton.codes import TritonCodeProducts

FORMATS = LAYOUTS | {"FP8 in blocks": FP8}
CHECKED = (
    [(torch.bfloat16, 1100, 1088, 4096), (torch.float16, 3, 640, 1536), (torch.float32, 70, 256, 2048)]
    if ON_GPU
    else [(torch.float32, 5, 70, 512)]
)
"""Dtype, rows, outputs, inputs."""
PARTS = (1, 64, 100, 550)
"""Rows that are multiplied without the others: each has tiles of its own, and 1,100 are multiplied by a library."""
TIMED = ("Q4_0", "GPTQ", "Q8_0", "Q6_K", "int8 per output", "FP8 in blocks")
TIMED_ROWS = (1, 16, 64, 512, 2048) if ON_GPU else (1, 3)
TIMED_SHAPE = (14336, 4096) if ON_GPU else (64, 512)
"""Outputs and inputs: those of a gate of Llama 3 8B."""
ENOUGH_BYTES = 1 << 29 if ON_GPU else 1
"""Bytes of codes that products take in turn, so that none finds its own in the L2 cache."""


def check_codes(_report: Report) -> Iterator[Row]:
    cases = [(name, *case) for name in FORMATS for case in CHECKED]
    if not ON_GPU:
        yield from itertools.starmap(_checked, cases)
        return
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:  # which all compile
        yield from pool.map(_checked, *zip(*cases, strict=True))


def _checked(name: str, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> Row:
    matrix = DeviceMatrix.of(stored(FORMATS[name], outputs, inputs), DEVICE)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)
    together, right = (_product(products, x, matrix) for products in (TritonCodeProducts(), TorchCodeProducts()))
    error = relative_error(together, right)
    # the interpreter multiplies as numpy does, whose bits depend on a row's place
    is_same = not ON_GPU or all(
        torch.equal(_product(TritonCodeProducts(), x[rows - part :], matrix), together[rows - part :])
        for part in PARTS
        if part < rows
    )
    found = f"{error:.1e}{'' if is_same else ', fewer rows have other bits'}"
    what = f"{name}, {rows} rows, {outputs} x {inputs}, {dtype}"
    return Row(what, found, None, f"<= {WORST[dtype]:.0e}", error <= WORST[dtype] and is_same)


def codes_speed(_report: Report) -> Iterator[Row]:
    """Times beside torch's product with the same matrix in bfloat16, which has two or four times the bytes."""
    outputs, inputs = TIMED_SHAPE
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    for name in TIMED:
        matrix = DeviceMatrix.of(stored(FORMATS[name], outputs, inputs), DEVICE)
        copies = copies_of(matrix)
        plain = [torch.randn(outputs, inputs, device=DEVICE, dtype=dtype) for _ in copies]
        for rows in TIMED_ROWS:
            x = torch.randn(rows, inputs, device=DEVICE, dtype=dtype)
            out = x.new_empty(rows, outputs)

            def ours(x: torch.Tensor = x, out: torch.Tensor = out, copies: list[DeviceMatrix] = copies) -> None:
                for each in copies:
                    TritonCodeProducts().product(x, each, None, out)

            def theirs(x: torch.Tensor = x, plain: list[torch.Tensor] = plain) -> None:
                for each in plain:
                    functional.linear(x, each)

            ours_ms, theirs_ms = (replayed_ms(each) / len(copies) for each in (ours, theirs))
            what = f"{name}, {rows} rows, {outputs} x {inputs}"
            yield Row(what, f"{ours_ms * 1e3:.1f} us ({theirs_ms * 1e3:.1f} plain)", ours_ms / theirs_ms, "of plain")


def _product(products: TritonCodeProducts | TorchCodeProducts, x: torch.Tensor, matrix: DeviceMatrix) -> torch.Tensor:
    out = x.new_empty(len(x), matrix.outputs)
    products.product(x, matrix, None, out)
    return out


def copies_of(matrix: DeviceMatrix) -> list[DeviceMatrix]:
    """Returns the matrix and so many copies that none finds its own in the L2 cache when they take turns."""
    return [matrix] + [_copied(matrix) for _ in range(ENOUGH_BYTES // matrix.codes.nbytes)]


def _copied(matrix: DeviceMatrix) -> DeviceMatrix:
    mins = None if matrix.mins is None else matrix.mins.clone()
    return replace(matrix, codes=matrix.codes.clone(), scales=matrix.scales.clone(), mins=mins)
