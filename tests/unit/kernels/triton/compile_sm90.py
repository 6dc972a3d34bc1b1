"""Compiles every Triton kernel for Hopper, no GPU needed, and prints what each takes: one JSON object per line.

    python tests/unit/kernels/triton/compile_sm90.py [kernel ...]     (TRITON_INTERPRET must not be set)

`ptxas` comes with Triton: registers per thread, bytes spilled, shared memory, and which instructions were chosen.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twostroke.kernels.page_forms.nibble_pool import LARGEST_HALF, SMALLEST_SCALE
from twostroke.kernels.pools.page_pool import LARGEST, PagePool
from twostroke.kernels.products.device_codes import KINDS as CODE_KINDS
from twostroke.kernels.products.grouped import TILE_ROWS
from twostroke.kernels.triton import codes, decode, elementwise, grouped, prefill, store
from twostroke.kernels.triton.bytes import KINDS
from twostroke.kernels.triton.checks import pool_arguments
from twostroke.kernels.triton.page_forms import nibble_spans, nibbles
from twostroke.page_forms.int4 import VALUE_GROUP
from twostroke.page_forms.page_form import PageShape

KV_HEADS, GROUP, BLOCK = 8, 4, 16
FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ALIGNED_INTEGERS = ("_stride", "inputs", "outputs", "row_words")
"""Arguments that are multiples of 16 in every serving shape, which Triton finds out at the launch."""


@dataclass(frozen=True)
class Variant:
    name: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 3


def variants() -> Iterator[Variant]:
    for dtype in (torch.bfloat16, torch.float32):
        for dim in (64, 80, 96, 128, 256):
            name = f"{dim}-{FLOATS[dtype]}"
            for rows in (1, 16):
                yield decode_variant(f"decode-{rows}-{name}", dim, dtype, rows, decode.decode_tuning(dim, dtype))
            yield prefill_variant(f"prefill-{name}", dim, dtype, prefill.prefill_tuning(dim, dtype))
            yield store_variant(f"store-{name}", dim, dtype)
    for form in KINDS:
        for dim in (64, 128):
            kind, name = torch.bfloat16, f"{dim}-{form}"
            yield decode_variant(f"decode-1-{name}", dim, kind, 1, decode.decode_tuning(dim, kind), form)
            yield prefill_variant(f"prefill-{name}", dim, kind, prefill.prefill_tuning(dim, kind), form)
            yield store_variant(f"store-{name}", dim, kind, form)
    for dtype in (torch.bfloat16, torch.float32):
        for dim in (64, 80, 128, 256):
            for rows in (1, 16):
                yield nibbles_variant(f"nibbles-{rows}-{dim}-{FLOATS[dtype]}", dim, dtype, rows)
            yield blocks_variant(f"blocks-{dim}-{FLOATS[dtype]}", dim, dtype)
    for dim, window in ((64, 128), (256, 512)):
        kind, name = torch.bfloat16, f"{dim}-window"
        yield decode_variant(f"decode-1-{name}", dim, kind, 1, decode.decode_tuning(dim, kind), window=window)
        yield prefill_variant(f"prefill-{name}", dim, kind, prefill.prefill_tuning(dim, kind), window=window)
        yield nibbles_variant(f"nibbles-1-{name}", dim, kind, 1, window=window)
    yield merge_variant("merge-128-bf16", 128, torch.bfloat16)
    yield from expert_variants()
    yield from code_variants()
    rows = dict.fromkeys(("x", "residual", "weight", "total", "out", "gate_up"), "*bf16")
    for width in (4096, 8192):
        constants = {"PADDED": width, "HAS_RESIDUAL": True}
        yield Variant(f"norm-{width}", elementwise.add_norm_kernel, rows, constants, elementwise.norm_warps(width))
    columns = {"COLUMNS": elementwise.SILU_COLUMNS}
    yield Variant("silu", elementwise.silu_mul_kernel, rows, columns, 4)


def decode_variant(
    name: str, dim: int, dtype: torch.dtype, rows: int, tuning: decode.DecodeTuning, form: str = "", window: int = 0
) -> Variant:
    kind = "*" + FLOATS[dtype]
    pointers = {"q": kind, "out": kind, "partials": "*fp32", "weights": "*fp32", **pool_pointers(kind, form)}
    constants = (shape_of(dim) | pool_constants(dim, form)) | {
        "KEYS": tuning.keys,
        "LEAST_SHARE": tuning.least_share,
        "PACKED_PAD": max(16, rows * GROUP),
        "WHOLE": False,
        **rule_constants(window),
    }
    tables = {"block_tables": "*i32", "fields": "*i32", "sinks": "*fp32"}
    return Variant(name, decode.decode_kernel, pointers | tables, constants, tuning.warps, tuning.stages)


def merge_variant(name: str, dim: int, dtype: torch.dtype) -> Variant:
    pointers = {"out": "*" + FLOATS[dtype], "partials": "*fp32", "weights": "*fp32", "fields": "*i32"}
    pointers["sinks"] = "*fp32"
    tuning = decode.decode_tuning(dim, dtype)
    share = {"KEYS": tuning.keys, "LEAST_SHARE": tuning.least_share, "CHUNK": decode.MERGE_CHUNK}
    share |= {"WINDOW": 128, "HAS_SINKS": True}
    return Variant(name, decode.merge_kernel, pointers, shape_of(dim) | share, 4)


def prefill_variant(
    name: str, dim: int, dtype: torch.dtype, tuning: prefill.PrefillTuning, form: str = "", window: int = 0
) -> Variant:
    kind = "*" + FLOATS[dtype]
    pointers = {"q": kind, "out": kind, **pool_pointers(kind, form), "block_tables": "*i32", "fields": "*i32"}
    pointers["sinks"] = "*fp32"
    constants = shape_of(dim) | pool_constants(dim, form) | rule_constants(window)
    constants |= {"ROWS": tuning.rows, "KEYS": tuning.keys}
    return Variant(name, prefill.prefill_kernel, pointers, constants, tuning.warps, tuning.stages)


def store_variant(name: str, dim: int, dtype: torch.dtype, form: str = "") -> Variant:
    kind = "*" + FLOATS[dtype]
    pointers = dict.fromkeys(("q", "k", "v", "rotated"), kind) | pool_pointers(kind, form)
    angles = {"centers": "*fp32", "write_slots": "*i64", "cosines": "*fp32", "sines": "*fp32"}
    constants = {
        "KV_HEADS": KV_HEADS,
        "GROUP": GROUP,
        "GROUP_PAD": GROUP,
        "HALF": dim // 2,
        "HALF_PAD": triton.next_power_of_2(dim // 2),
        "TOKENS": store.TOKENS,
        "LARGEST": LARGEST.get(form, 0.0),
        "IS_CENTERED": form != "",
        **pool_constants(dim, form),
    }
    return Variant(name, store.store_kernel, pointers | angles, constants, 4)


def rule_constants(window: int) -> dict[str, Any]:
    """With a window, all that a rule can have; else nothing."""
    return {"WINDOW": window, "CAPPED": window != 0, "HAS_SINKS": window != 0}


def nibbles_variant(name: str, dim: int, dtype: torch.dtype, rows: int, window: int = 0) -> Variant:
    kind, tuning = "*" + FLOATS[dtype], decode.decode_tuning(dim, dtype)
    pointers = {"q": kind, "out": kind, "partials": "*fp32", "weights": "*fp32", **nibble_pointers(kind)}
    constants = (shape_of(dim) | nibble_constants(dim)) | {
        "KEYS": tuning.keys,
        "EXACT_KEYS": BLOCK if rows == 1 else tuning.keys,
        "LEAST_SHARE": tuning.least_share,
        "PACKED_PAD": max(16, rows * GROUP),
        "WHOLE": False,
        **rule_constants(window),
    }
    tables = {"block_tables": "*i32", "fields": "*i32", "exact_slots": "*i64", "sinks": "*fp32"}
    return Variant(name, nibble_spans.nibble_kernel, pointers | tables, constants, tuning.warps, tuning.stages)


def blocks_variant(name: str, dim: int, dtype: torch.dtype) -> Variant:
    pointers = nibble_pointers("*" + FLOATS[dtype]) | {"write_slots": "*i64", "exact_slots": "*i64"}
    constants = nibble_constants(dim) | {"LARGEST": LARGEST_HALF, "SMALLEST": SMALLEST_SCALE}
    return Variant(name, nibbles.store_blocks_kernel, pointers, constants, 4)


def expert_variants() -> Iterator[Variant]:
    for dtype in (torch.bfloat16, torch.float32):
        for is_gather in (True, False):
            yield grouped_variant(f"grouped-{'gather' if is_gather else 'scatter'}-{FLOATS[dtype]}", dtype, is_gather)
    combined = {"answers": "*bf16", "weights": "*fp32", "out": "*fp32"}
    constants = {"PER_TOKEN": 8, "COLUMNS": grouped.COMBINED_COLUMNS}
    yield Variant("combine", grouped.combine_kernel, combined, constants, 4)


def grouped_variant(name: str, dtype: torch.dtype, is_gather: bool) -> Variant:
    tuning = grouped.grouped_tuning(dtype)
    pointers = dict.fromkeys(("x", "weight", "bias", "y"), "*" + FLOATS[dtype])
    pointers |= dict.fromkeys(("order", "tile_starts", "tile_ends", "tile_experts"), "*i32")
    constants = {"IS_GATHER": is_gather, "HAS_BIAS": False, "ROWS": TILE_ROWS}
    constants |= {"OUTPUTS": tuning.outputs, "INPUTS": tuning.inputs}
    return Variant(name, grouped.grouped_kernel, pointers, constants, tuning.warps, tuning.stages)


def code_variants() -> Iterator[Variant]:
    """Four scales of each step of inputs, as in most GGUF files; one for a step; one for each output."""
    for dtype in (torch.bfloat16, torch.float32):
        for kind in CODE_KINDS:
            for group in (32, 128, 4096):
                for rows in (1, 64, 128, 512):
                    yield codes_variant(f"codes-{rows}-{kind}-{group}-{FLOATS[dtype]}", dtype, kind, group, rows)
    for kind in CODE_KINDS:
        pointers, constants = code_arguments(torch.bfloat16, kind, 32, codes.EXPAND_INPUTS)
        yield Variant(f"expand-{kind}", codes.expand_kernel, pointers | {"w": "*bf16"}, constants, 4)


def codes_variant(name: str, dtype: torch.dtype, kind: str, group: int, rows: int) -> Variant:
    plain, tuning = "*" + FLOATS[dtype], codes.codes_tuning(rows, 14336, dtype)
    pointers, constants = code_arguments(dtype, kind, group, tuning.inputs)
    pointers |= {"x": plain, "y": plain, "bias": plain}
    constants |= {"ROWS": tuning.rows, "OUTPUTS": tuning.outputs, "HAS_BIAS": False}
    return Variant(name, codes.codes_kernel, pointers, constants, tuning.warps, tuning.stages)


def code_arguments(dtype: torch.dtype, kind: str, group: int, step: int) -> tuple[dict[str, str], dict[str, Any]]:
    """(Pointers, constants) of matrices of such codes, integers of 4 bits with mins."""
    constants = {"KIND": CODE_KINDS.index(kind), "OFFSET": 8 * (kind == "int4"), "GROUP": group, "STEP": step}
    constants |= {"PART": min(group, step), "GROUPS": 4096 // group, "HAS_MINS": kind == "int4"}
    return {"codes": "*i32", "scales": "*fp16", "mins": "*fp16"}, constants


def nibble_pointers(kind: str) -> dict[str, str]:
    return {"words": "*i32", "halves": "*fp16", "exact": kind}


def nibble_constants(dim: int) -> dict[str, int]:
    exact = pool_constants(dim, "")
    strides = {f"EXACT_{name}": exact[name] for name in ("LAYER", "VALUES", "HEAD")}
    return {"DIM": dim, "DIM_PAD": triton.next_power_of_2(dim), "WIDTH": VALUE_GROUP, **strides}


def pool_pointers(kind: str, form: str) -> dict[str, str]:
    return {"pool": "*u8" if form else kind, "scales": "*fp32"}


def pool_constants(dim: int, form: str) -> dict[str, Any]:
    """What `pool_arguments` says of a pool in such a form; without one, of plain numbers."""
    pool = PagePool.empty(1, form or "bfloat16", PageShape(1, KV_HEADS, BLOCK, dim))
    return pool_arguments(pool)


def shape_of(dim: int) -> dict[str, int]:
    return {"KV_HEADS": KV_HEADS, "GROUP": GROUP, "DIM": dim, "DIM_PAD": triton.next_power_of_2(dim)}


def compile_variant(variant: Variant) -> dict[str, Any]:
    kernel, signature, aligned = variant.kernel, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
        elif name in variant.pointers:
            signature[name] = variant.pointers[name]
        else:
            signature[name] = "fp32" if name in ("scale_log2", "cap_log2", "epsilon") else "i32"
        parameter = kernel.params[index]
        is_specialized = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if is_specialized and (name in variant.pointers or name.endswith(ALIGNED_INTEGERS)):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, variant.constants, aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    return {
        "kernel": variant.name,
        "shared_bytes": compiled.metadata.shared,
        **resources(compiled.asm["cubin"]),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "cp_async_16": len(re.findall(r"cp\.async\.cg\.shared\.global \[[^,]*, \[[^,]*, 0x10", ptx)),
        "cp_async_less": len(re.findall(r"cp\.async\.ca\.shared\.global", ptx)),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Returns what the machine code needs: registers per thread, and bytes of stack, where registers are spilled to."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert used is not None, said
    return {"registers": int(used[1]), "stack_bytes": int(used[2])}


if __name__ == "__main__":
    wanted = tuple(sys.argv[1:])
    for each in variants():
        if each.name.startswith(wanted or ""):
            print(json.dumps(compile_variant(each)), flush=True)
