"""Whichever compiler has built the native kernels, a row has the same bits."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.unit.kernels.cpu.test_attention import TOLERANCE, Case
from tests.unit.kernels.variants import IN_GATE
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import FLAGS, SOURCES, Kernels, arithmetic_identity, find_compiler, load_kernels
from twostroke.kernels.cpu.variants import VARIANTS
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.models.catalog.places import cache_dir

SPANS = [(0, 150), (900, 1), (31, 20), (700, 70), (1100, 9)]


@pytest.fixture(scope="module")
def by_compiler() -> dict[str, Kernels]:
    """The best kernels for this CPU, as each compiler builds them; kept in the user's cache, as a worker's are."""
    built = {}
    for compiler in filter(shutil.which, ("g++", "clang++")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", compiler)
            kernels = load_kernels(cache_dir() / "kernels")
        assert kernels is not None
        built[compiler] = kernels
    if len(built) < 2:
        pytest.skip("one compiler has nothing to agree with")
    return built


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head_dim", [64, 20])
def test_gcc_and_clang_agree_to_the_bit(by_compiler: dict[str, Kernels], dtype: torch.dtype, head_dim: int) -> None:
    results = []
    for kernels in by_compiler.values():
        case = Case(
            {"kv_heads": 3, "groups": 3, "head_dim": head_dim, "block": 16, "dtype": dtype, "spans": SPANS, "seed": 11}
        )
        step = NativeAttention(PagePool.plain(case.pool), case.heads, case.scale, kernels).begin(case.batch)
        rotated = step.store(0, *case.qkv())
        results.append((rotated, case.pool, step.attend(0, rotated)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_libraries_of_two_compilers_are_two_files_and_two_identities(by_compiler: dict[str, Kernels]) -> None:
    libraries = {Path(kernels.library._name) for kernels in by_compiler.values()}
    assert len(libraries) == 2
    assert len({arithmetic_identity(kernels) for kernels in by_compiler.values()}) == 2


@pytest.mark.slow
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the instruction is x86's")
def test_products_of_many_rows_still_fetch_the_next_panel_once_they_are_compiled() -> None:
    """GCC 12 takes a loop of nothing but __builtin_prefetch away; steps with 8 to 96 rows then wait for memory."""
    (variant,) = (each for each in VARIANTS if each.name == "avx512_bf16")
    command = [*find_compiler().command, *FLAGS.split(), *variant.flags.split(), "-S", "-o", "-"]
    assembly = subprocess.run([*command, SOURCES / "linear.cpp"], capture_output=True, text=True, check=True).stdout
    assert "prefetcht1" in assembly


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the flags are those of x86's compilers")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["avx2", "avx512", "avx512_bf16", "amx"])
def test_every_variant_can_be_compiled_on_a_machine_that_would_choose_another(name: str) -> None:
    (variant,) = (each for each in VARIANTS if each.name == name)
    if name in IN_GATE:
        pytest.skip("all other tests compile it")
    command = [*find_compiler().command, *FLAGS.split(), *variant.flags.split(), f"-I{SOURCES}", "-fsyntax-only"]
    checked = subprocess.run([*command, *sorted(SOURCES.rglob("*.cpp"))], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr[:2000]
