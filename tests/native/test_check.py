"""The native kernels of machines that are not at hand: compiled with emulated instructions, or run by qemu."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import twostroke.kernels.cpu
from twostroke.kernels.cpu.variants import VARIANTS, Variant, usable_features

HERE = Path(__file__).parent
NATIVE = Path(twostroke.kernels.cpu.__file__).parent / "native"
PRODUCTS = ("team", "lease", "linear", "low_rank", "stored/stored", "fused")
PARTS = ("page_forms/attend_bytes", "page_forms/attend_nibbles", "latents/latents")
SOURCES = (*PRODUCTS, "attention", *PARTS, "expanded", "store", "plan")
AMX = next(each for each in VARIANTS if each.name == "amx")
OPTIONS = ("-std=c++17", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wno-psabi")


def complaints(
    compiler: str,
    *options: str,
    built: Path,
    run: tuple[str, ...] = (),
    native: Path = NATIVE,
    is_whole: bool = True,
) -> str:
    """Builds the check with the sources in `native` and runs it; what it prints is what is wrong."""
    checks = [HERE / "check.cpp", *([HERE / "check_attention.cpp", HERE / "check_latents.cpp"] if is_whole else [])]
    files = [*checks, *(native / f"{name}.cpp" for name in (SOURCES if is_whole else PRODUCTS))]
    parts = () if is_whole else ("-DONLY_PRODUCTS",)
    command = [compiler, *OPTIONS, *parts, f"-I{native}", *options, *map(str, files), "-o", str(built)]
    subprocess.run(command, check=True)
    done = subprocess.run([*run, str(built)], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def emulated(variant: Variant, *options: str, built: Path, native: Path = NATIVE) -> str:
    """What the check finds in a variant whose instructions are emulated. AMX differs from AVX-512 in products alone.

    Without optimisation: inlining what stands for an instruction takes minutes, and the check itself takes seconds.
    """
    need("g++")
    extensions = [flag.removeprefix("-m") for flag in variant.flags.split() if flag.startswith(("-mavx512", "-mamx"))]
    defined = (f"-D__{extension.upper().replace('-', '_')}__" for extension in extensions)
    options = ("-O0", f"-I{HERE / 'emulated'}", *defined, *options)
    return complaints("g++", *options, built=built, native=native, is_whole=variant != AMX)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [each for each in VARIANTS if "avx512f" in each.needs], ids=lambda each: each.name)
def test_avx512_and_amx_kernels_equal_plain_loops(tmp_path: Path, variant: Variant) -> None:
    """With emulated instructions where the processor does not have them: that takes several times as long.

    Machines that have the instructions hold these kernels against torch in the gate.
    """
    if variant.needs <= usable_features():
        need("g++")
        assert complaints("g++", "-O0", *variant.flags.split(), built=tmp_path / "check") == ""
    else:
        assert emulated(variant, built=tmp_path / "check") == ""


@pytest.mark.slow
def test_rows_of_tiles_are_independent_whichever_order_of_sums_a_tile_has(tmp_path: Path) -> None:
    assert emulated(AMX, "-DTILES_ADD_PAIR_BY_PAIR", built=tmp_path / "check") == ""


@pytest.mark.slow
@pytest.mark.parametrize("option", ["-DTILES_ADD_PAIR_BY_PAIR", "-UTILES_ADD_PAIR_BY_PAIR"])
def test_the_check_notices_few_rows_that_are_multiplied_without_tiles(tmp_path: Path, option: str) -> None:
    wrong = with_change(
        tmp_path,
        "panel_amx.h",
        "    if (whole < steps) {",
        """    if (is_only_pass) {
        store_tiles<HAS_TWO>(sums);
        for (int64_t r = 0; r < 4; r++)
            for (int64_t half = 0; half < 2; half++) {
                __m512 sum = _mm512_setzero_ps();
                for (int64_t i = 0; i < steps; i++) {
                    int32_t pair;
                    std::memcpy(&pair, x + r * x_bytes + i * 4, 4);
                    const __m512i w16 = _mm512_loadu_si512(weights + (2 * i + half) * LINE);
                    sum = _mm512_dpbf16_ps(sum, (__m512bh)w16, (__m512bh)_mm512_set1_epi32(pair));
                }
                _mm512_storeu_ps(sums + r * PANEL + half * LANES, sum);
            }
        return;
    }
    if (whole < steps) {""",
    )
    told = emulated(AMX, option, built=tmp_path / "check", native=wrong)
    assert "64 x 320: a row depends on its neighbours" in told


ARM = {
    "neon": ("", "max", True),
    "neon_bf16": ("-march=armv8.2-a+bf16+dotprod", "max", False),
    "sve256_bf16": ("-march=armv8.2-a+sve+bf16 -msve-vector-bits=256", "max,sve-default-vector-length=32", True),
    "sve512": ("-march=armv8.2-a+sve -msve-vector-bits=512", "max,sve-default-vector-length=64", True),
}
"""Flags, the processor that runs it, and whether more than its products are its own."""


def test_arm_variants_are_compiled_as_they_are_checked() -> None:
    flags = {each.name: each.flags for each in VARIANTS if each.machine == "aarch64"}
    assert flags == {name: flags for name, (flags, _, _) in ARM.items() if flags}


@pytest.mark.parametrize("name", ARM)
def test_arm_kernels_equal_plain_loops_under_qemu(tmp_path: Path, name: str) -> None:
    need("aarch64-linux-gnu-g++", "qemu-aarch64")
    flags, processor, is_whole = ARM[name]
    built, run = tmp_path / "check", ("qemu-aarch64", "-cpu", processor)
    options = ("-O1", "-static", *flags.split())
    assert complaints("aarch64-linux-gnu-g++", *options, built=built, run=run, is_whole=is_whole) == ""
    code = subprocess.run(["aarch64-linux-gnu-objdump", "-d", built], capture_output=True, text=True, check=True).stdout
    assert ("bfdot" in code) == ("bf16" in name)


def with_change(folder: Path, name: str, right: str, wrong: str) -> Path:
    """A copy of the native sources with another text in one of them."""
    copy = folder / "native"
    shutil.copytree(NATIVE, copy)
    text = (copy / name).read_text()
    assert right in text
    (copy / name).write_text(text.replace(right, wrong))
    return copy


@pytest.mark.slow
def test_the_check_notices_tokens_that_see_what_comes_after_them(tmp_path: Path) -> None:
    need("g++")
    wrong = with_change(tmp_path, "rows.h", "std::clamp<int64_t>(limits.end - start, 0, count)", "count")
    told = complaints("g++", "-O0", built=tmp_path / "check", native=wrong)
    assert "attention" in told


@pytest.mark.slow
def test_the_check_notices_values_of_four_bits_without_their_centers(tmp_path: Path) -> None:
    need("g++")
    wrong = with_change(tmp_path, "page_forms/attend_nibbles.cpp", "simd::add(sums[r][v], base)", "sums[r][v]")
    told = complaints("g++", "-O0", built=tmp_path / "check", native=wrong)
    assert told
    assert all("form 6: not what loops give" in line for line in told.splitlines())
