"""Every Triton kernel through the compiler for Hopper, which needs no GPU and refuses what an interpreter lets pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.models.catalog.places import cache_dir

SHARED_BYTES_OF_A_HOPPER_BLOCK = 227 * 1024
IN_GATE = (
    "decode-1-128-bf16",
    "prefill-128-bf16",
    "store-80-bf16",
    "decode-1-64-int8",
    "nibbles-1-128-bf16",
    "blocks-80-bf16",
    "grouped-gather-bf16",
    "codes-1-int4-32-bf16",
    "expand-int4",
    "combine",
    "merge",
)
"""One of every kernel."""
OTHERS = (
    "decode-16-64-bf16",
    "prefill-80-bf16",
    "decode-1-128-fp8_e4m3",
    "prefill-128-int8",
    "store-64-fp8_e4m3",
    "nibbles-16-64-bf16",
    "decode-1-64-window",
    "prefill-256-window",
    "nibbles-1-64-window",
    "grouped-scatter-fp32",
    "codes-1-fp4-32-fp32",
    "codes-64-fp8-128-bf16",
    "codes-128-int8-4096-bf16",
    "codes-512-int4-32-bf16",
    "expand-fp8",
)
"""More widths, forms and windows of the same kernels: `make slow` compiles them."""


@pytest.mark.parametrize(
    "names", [pytest.param(IN_GATE, id="of the gate"), pytest.param(OTHERS, id="others", marks=pytest.mark.slow)]
)
def test_kernels_compile_for_hopper_without_spills_and_with_its_instructions(names: tuple[str, ...]) -> None:
    """What was compiled of the same sources is kept: Triton's key has a kernel's source, its options and Triton."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache_dir() / "triton"), "PYTHONPATH": str(Path.cwd())}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "error", str(Path(__file__).with_name("compile_sm90.py")), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    kernels = {kernel["kernel"]: kernel for kernel in map(json.loads, done.stdout.splitlines())}
    assert len(kernels) == len(names)
    for name, kernel in kernels.items():
        assert kernel["stack_bytes"] == 0, f"{name} spills registers: {kernel}"
        assert kernel["shared_bytes"] <= SHARED_BYTES_OF_A_HOPPER_BLOCK, name
        if name.startswith(("decode", "prefill", "nibbles")):
            assert kernel["cp_async_16"] > 0, f"{name} does not copy K and V ahead, 16 bytes at a time: {kernel}"
            has_scales = name.startswith("nibbles") or not name.endswith(
                ("bf16", "window")
            )  # of two or four bytes each
            assert has_scales or kernel["cp_async_less"] == 0, f"{name} copies in small pieces: {kernel}"
        if name.startswith(("prefill-128-bf16", "codes")):
            assert kernel["wgmma"] > 0, f"{name} is not on Hopper's tensor cores"
        if name == "decode-1-128-bf16":
            assert kernel["mma"] > 0, f"{name} is on no tensor cores"
        if name.startswith("grouped-gather"):
            assert kernel["mma"] + kernel["wgmma"] > 0, f"{name} is on no tensor cores"
