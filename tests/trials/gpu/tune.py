"""This program shows where a step's time goes, and whether other tiles are faster: run it where `make gpu` misses a
mark.

    python -m tests.trials.gpu.tune [parts] [decode] [prefill] [codes]

Needs a GPU; three or four minutes in all, mostly of compiling. The names are those of its sections, all by default.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from tests.trials.gpu.attention import DTYPE, decode_s, layers_for, prefill_s, random_pool
from tests.trials.gpu.codes import FORMATS, copies_of
from tests.trials.gpu.kernels import WORST
from tests.trials.gpu.measure import DEVICE, ceilings, replayed_ms
from tests.trials.gpu.report import Report, Row
from tests.trials.gpu.shapes import BLOCK, LLAMA_8B
from tests.unit.kernels.stored_matrices import stored
from twostroke.kernels.attention.spans import TokenSlots
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.products.device_codes import DeviceMatrix
from twostroke.kernels.triton.codes import CodesTuning, product_of_codes
from twostroke.kernels.triton.decode import DecodeTuning
from twostroke.kernels.triton.elementwise import TritonElementwise
from twostroke.kernels.triton.prefill import PrefillTuning
from twostroke.kernels.triton.store import rotate_and_store

BATCH = 64
LIBRARIES = ("cublas", "cublaslt")
REPEATS = 32
"""The repeats of a kernel that is too short to be timed alone."""

DECODES = (
    DecodeTuning(keys=64, warps=4, stages=3, least_share=128),
    DecodeTuning(keys=64, warps=4, stages=3, least_share=128, programs_per_sm=3),
    DecodeTuning(keys=64, warps=4, stages=3, least_share=128, programs_per_sm=16),
    DecodeTuning(keys=64, warps=4, stages=4, least_share=128),
    DecodeTuning(keys=64, warps=2, stages=3, least_share=128),
    DecodeTuning(keys=32, warps=2, stages=4, least_share=128),
    DecodeTuning(keys=128, warps=4, stages=2, least_share=128),
    DecodeTuning(keys=128, warps=8, stages=3, least_share=128),
)
PREFILLS = (
    PrefillTuning(rows=128, keys=128, warps=8, stages=3),
    PrefillTuning(rows=128, keys=128, warps=8, stages=2),
    PrefillTuning(rows=128, keys=64, warps=8, stages=3),
    PrefillTuning(rows=128, keys=64, warps=8, stages=4),
    PrefillTuning(rows=128, keys=64, warps=4, stages=3),
    PrefillTuning(rows=64, keys=64, warps=4, stages=3),
    PrefillTuning(rows=64, keys=128, warps=4, stages=2),
)

CODES = {
    16: (
        CodesTuning(rows=16, outputs=64, inputs=128, warps=4, stages=4),
        CodesTuning(rows=16, outputs=64, inputs=128, warps=4, stages=6),
        CodesTuning(rows=16, outputs=64, inputs=256, warps=4, stages=3),
        CodesTuning(rows=16, outputs=128, inputs=128, warps=8, stages=4),
    ),
    64: (
        CodesTuning(rows=64, outputs=128, inputs=128, warps=8, stages=3),
        CodesTuning(rows=64, outputs=64, inputs=128, warps=4, stages=3),
        CodesTuning(rows=64, outputs=64, inputs=64, warps=4, stages=4),
    ),
    512: (
        CodesTuning(rows=128, outputs=128, inputs=64, warps=8, stages=3),
        CodesTuning(rows=256, outputs=128, inputs=64, warps=8, stages=3),
        CodesTuning(rows=256, outputs=64, inputs=64, warps=4, stages=3),
    ),
}
"""Tiles by the rows that they are measured with."""
CODE_SHAPES = ((14336, 4096), (4096, 4096), (4096, 14336))
"""Outputs and inputs: those of an 8B-shaped model, the last two of which are 64 tiles for 132 multiprocessors."""


def main(wanted: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        print("tests.trials.gpu.tune measures a GPU, and there is none", file=sys.stderr)
        return 2
    findings = Report(wanted=tuple(wanted))
    with torch.inference_mode():
        findings.section("ceilings", ceilings, is_needed=True)
        findings.section("parts of a step", parts)
        findings.section("decode", decodes)
        findings.section("prefill", prefills)
        findings.section("codes", products_of_codes)
    findings.print_table(torch.cuda.get_device_name())
    return findings.exit_code


def parts(report: Report) -> Iterator[Row]:
    """Times the parts of an 8B-shaped model: each product as a share of the copy bandwidth, each small kernel in
    microseconds."""
    spec = LLAMA_8B
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    products = {
        "qkv": (q_rows + 2 * kv_rows, spec.hidden_size),
        "output": (spec.hidden_size, q_rows),
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "head": (spec.vocab_size, spec.hidden_size),
    }
    for name, shape in products.items():
        weights = [torch.randn(shape, device=DEVICE, dtype=DTYPE) for _ in range(layers_for(2 * shape[0] * shape[1]))]
        x = torch.randn(BATCH, shape[1], device=DEVICE, dtype=DTYPE)
        for library in LIBRARIES:
            torch.backends.cuda.preferred_blas_library(library)
            ms = replayed_ms(lambda x=x, weights=weights: [torch.nn.functional.linear(x, w) for w in weights])  # type: ignore[misc]
            seconds = ms / 1e3 / len(weights)
            share = weights[0].nbytes / seconds / report.ceilings["copy"]
            yield Row(f"{name}, batch {BATCH}, {library}", f"{seconds * 1e6:.1f} us", share, "of copy")
    torch.backends.cuda.preferred_blas_library("default")
    for name, launch in small_kernels().items():
        ms = replayed_ms(lambda launch=launch: [launch() for _ in range(REPEATS)])  # type: ignore[misc]
        yield Row(f"{name}, batch {BATCH}", f"{ms * 1e3 / REPEATS:.1f} us")


def small_kernels() -> dict[str, Callable[[], object]]:
    spec, kernels = LLAMA_8B, TritonElementwise()
    x, residual = (torch.randn(BATCH, spec.hidden_size, device=DEVICE, dtype=DTYPE) for _ in range(2))
    weight = torch.ones(spec.hidden_size, device=DEVICE, dtype=DTYPE)
    gate_up = torch.randn(BATCH, 2 * spec.intermediate_size, device=DEVICE, dtype=DTYPE)
    heads = [spec.heads, spec.kv_heads, spec.kv_heads]
    qkv = torch.randn(BATCH, sum(heads), spec.head_dim, device=DEVICE, dtype=DTYPE)
    q, k, v = torch.split(qkv, heads, dim=1)
    pool = random_pool(BATCH, 1)
    angles = torch.zeros(BATCH, spec.head_dim // 2, device=DEVICE)
    placement = TokenSlots(torch.arange(BATCH, device=DEVICE) * BLOCK, angles, angles)
    logits = torch.randn(BATCH, spec.vocab_size, device=DEVICE, dtype=DTYPE)
    return {
        "norm of a sum": lambda: kernels.add_norm(x, residual, weight, 1e-5),
        "gated product": lambda: kernels.silu_mul(gate_up),
        "rope and store": lambda: rotate_and_store(q, k, v, PagePool.plain(pool), 0, placement),
        "likeliest token": lambda: logits.argmax(dim=-1),
    }


def decodes(report: Report) -> Iterator[Row]:
    for context in (2048, 8192):
        kv_bytes = BATCH * context * 2 * LLAMA_8B.kv_heads * LLAMA_8B.head_dim * DTYPE.itemsize
        for tuning in DECODES:

            def measured(tuning: DecodeTuning = tuning, context: int = context, kv_bytes: int = kv_bytes) -> float:
                seconds, error = decode_s(BATCH, context, layers_for(kv_bytes), tuning)
                assert error <= WORST[DTYPE], f"wrong by {error:.1e}"
                return seconds

            name = f"context {context}: {_named(tuning, 'keys', 'warps', 'stages', 'programs_per_sm')}"
            yield _row(name, measured, kv_bytes / report.ceilings["copy"], "of copy")


def prefills(report: Report) -> Iterator[Row]:
    for tokens in (2048, 8192):
        flop = 4 * LLAMA_8B.heads * LLAMA_8B.head_dim * tokens * (tokens + 1) // 2
        for tuning in PREFILLS:

            def measured(tuning: PrefillTuning = tuning, tokens: int = tokens) -> float:
                return prefill_s(tokens, tuning)

            name = f"chunk {tokens}: {_named(tuning, 'rows', 'keys', 'warps', 'stages')}"
            yield _row(name, measured, flop / report.ceilings["matmul"], "of matmul")


def products_of_codes(_report: Report) -> Iterator[Row]:
    """Times tiles of products of Q4_0 beside torch's products in bfloat16, in microseconds."""
    for outputs, inputs in CODE_SHAPES:
        copies = copies_of(DeviceMatrix.of(stored(FORMATS["Q4_0"], outputs, inputs), DEVICE))
        plain = [
            torch.randn(outputs, inputs, device=DEVICE, dtype=DTYPE) for _ in range(layers_for(2 * outputs * inputs))
        ]
        for rows, tunings in CODES.items():
            x = torch.randn(rows, inputs, device=DEVICE, dtype=DTYPE)
            out = x.new_empty(rows, outputs)
            plain_s = replayed_ms(lambda x=x, plain=plain: [torch.nn.functional.linear(x, w) for w in plain])  # type: ignore[misc]
            for tuning in tunings:

                def measured(
                    tuning: CodesTuning = tuning,
                    x: torch.Tensor = x,
                    out: torch.Tensor = out,
                    copies: list[DeviceMatrix] = copies,
                ) -> float:
                    launches = replayed_ms(lambda: [product_of_codes(x, each, None, out, tuning) for each in copies])
                    return launches / 1e3 / len(copies)

                tiles = _named(tuning, "rows", "outputs", "inputs", "warps", "stages")
                name = f"{rows} rows, {outputs} x {inputs}: {tiles}"
                yield _row(name, measured, plain_s / 1e3 / len(plain), "plain over it")


def _row(name: str, measured: Callable[[], float], floor_s: float, wanted: str) -> Row:
    """Tiles that a device has no room for are a finding too."""
    try:
        seconds = measured()
    except Exception as error:  # the compiler's and the launcher's have no common ancestor
        return Row(name, f"{type(error).__name__}: {str(error).strip()[:60]}")
    return Row(name, f"{seconds * 1e6:.0f} us", floor_s / seconds, wanted)


def _named(tuning: object, *fields: str) -> str:
    return " ".join(f"{field}={getattr(tuning, field)}" for field in fields)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m tests.trials.gpu.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("wanted", nargs="*", metavar="SECTION", help="how the names of sections begin (default: all)")
    sys.exit(main(parser.parse_args().wanted))
