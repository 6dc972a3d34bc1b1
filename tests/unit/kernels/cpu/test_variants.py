"""Which variants a machine can run, as its processor and its system say."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest

from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu import variants
from twostroke.kernels.cpu.variants import OVERRIDE, VARIANTS, chosen_variants, cpu_features, may_use_tiles

SAPPHIRE_RAPIDS = (
    "flags : fma f16c avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8"
)


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(OVERRIDE, raising=False)
    may_use_tiles.cache_clear()
    yield
    may_use_tiles.cache_clear()


def names() -> list[str]:
    return [variant.name for variant in chosen_variants()]


def cpu(monkeypatch: pytest.MonkeyPatch, line: str, sve_bits: int = 0) -> None:
    monkeypatch.setattr(variants, "_fact_of_cpu", lambda *keys: line)
    monkeypatch.setattr(variants, "_sve_bits", lambda: sve_bits)


@pytest.mark.parametrize(("granted", "best"), [(True, "amx"), (False, "avx512_bf16")])
def test_tiles_are_for_processes_that_the_system_lets_use_them(
    monkeypatch: pytest.MonkeyPatch, granted: bool, best: str
) -> None:
    cpu(monkeypatch, SAPPHIRE_RAPIDS)
    monkeypatch.setattr(variants, "may_use_tiles", lambda: granted)
    assert names()[0] == best


def test_the_system_is_asked_once_and_one_line_says_that_it_refuses(caplog: pytest.LogCaptureFixture) -> None:
    if "amx_tile" in cpu_features().split():
        pytest.skip("this system has tiles to give")
    with caplog.at_level(logging.WARNING):
        assert not may_use_tiles()
        assert not may_use_tiles()
    assert [record.message.split(":")[0] for record in caplog.records] == ["the system does not let AMX be used"]


def test_a_system_without_tiles_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu(monkeypatch, SAPPHIRE_RAPIDS.replace("amx_int8", ""))
    monkeypatch.setattr(variants, "may_use_tiles", lambda: pytest.fail("it was asked"))
    assert names()[0] == "avx512_bf16"


@pytest.mark.parametrize(
    ("line", "sve_bits", "able"),
    [
        ("Features : fp asimd evtstrm", 0, ["portable"]),
        ("Features : asimd asimddp bf16", 0, ["neon_bf16", "portable"]),
        ("Features : asimd asimddp bf16 sve svebf16", 256, ["sve256_bf16", "neon_bf16", "portable"]),
        ("Features : asimd asimddp bf16 sve svebf16", 128, ["neon_bf16", "portable"]),
        ("Features : asimd asimddp sve", 512, ["sve512", "portable"]),
    ],
)
def test_an_arm_processor_runs_what_its_features_and_the_width_of_its_vectors_allow(
    monkeypatch: pytest.MonkeyPatch, line: str, sve_bits: int, able: list[str]
) -> None:
    cpu(monkeypatch, line, sve_bits)
    assert names() == able


def test_every_variant_needs_what_the_less_preferred_ones_of_its_family_do() -> None:
    x86 = [variant.needs for variant in VARIANTS if variant.machine == "x86_64"]
    assert all(better > worse for better, worse in itertools.pairwise(x86))


@pytest.mark.parametrize("asked", ["avx512_bf16", "quick"])
def test_a_variant_that_this_machine_cannot_run_is_refused_with_the_choices(
    monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    cpu(monkeypatch, "flags : avx2 fma f16c")
    monkeypatch.setenv(OVERRIDE, asked)
    with pytest.raises(ConfigError, match="avx2, portable, torch"):
        chosen_variants()
