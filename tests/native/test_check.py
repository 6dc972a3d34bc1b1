"""The native kernels of machines that are not at hand: compiled with emulated instructions, or run by qemu."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import twostroke.kernels.cpu
from twostroke.kernels.cpu.build import VARIANTS, Variant

HERE = Path(__file__).parent
NATIVE = Path(twostroke.kernels.cpu.__file__).parent / "native"
SOURCES = tuple(
    str(NATIVE / f"{name}.cpp") for name in ["attention", "store", "plan", "team", "lease", "linear", "fused"]
)
OPTIONS = ("-O1", "-std=c++17", "-pthread", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-Wno-psabi")


def complaints(compiler: str, *options: str, sources: tuple[str, ...], built: Path, run: tuple[str, ...] = ()) -> str:
    """Build the check and run it; what it prints is what is wrong."""
    subprocess.run([compiler, *OPTIONS, f"-I{NATIVE}", *options, *sources, "-o", str(built)], check=True)
    done = subprocess.run([*run, str(built)], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


@pytest.mark.parametrize("variant", [each for each in VARIANTS if "avx512f" in each.needs], ids=lambda each: each.name)
def test_avx512_kernels_equal_plain_loops_with_emulated_instructions(tmp_path: Path, variant: Variant) -> None:
    need("g++")
    extensions = [flag.removeprefix("-m") for flag in variant.flags.split() if flag.startswith("-mavx512")]
    defined = (f"-D__{extension.upper()}__" for extension in extensions)
    sources = (str(HERE / "check.cpp"), *SOURCES)
    assert complaints("g++", f"-I{HERE / 'emulated'}", *defined, sources=sources, built=tmp_path / "check") == ""


def test_arm_kernels_equal_plain_loops_under_qemu(tmp_path: Path) -> None:
    need("aarch64-linux-gnu-g++", "qemu-aarch64")
    sources = (str(HERE / "check.cpp"), *SOURCES)
    run = ("qemu-aarch64",)
    assert complaints("aarch64-linux-gnu-g++", "-static", sources=sources, built=tmp_path / "check", run=run) == ""


def test_the_check_notices_tokens_that_see_what_comes_after_them(tmp_path: Path) -> None:
    need("g++")
    header = (NATIVE / "rows.h").read_text()
    wrong = header.replace("std::clamp<int64_t>(limits[r] - split.start, 0, split.count)", "split.count")
    assert wrong != header
    (tmp_path / "native").mkdir()
    for file in NATIVE.iterdir():
        (tmp_path / "native" / file.name).write_text(wrong if file.name == "rows.h" else file.read_text())
    sources = (str(HERE / "check.cpp"), *(str(tmp_path / "native" / Path(source).name) for source in SOURCES))
    told = complaints("g++", "-O0", f"-I{tmp_path / 'native'}", sources=sources, built=tmp_path / "check")
    assert "attention" in told
