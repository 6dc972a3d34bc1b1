"""The variant that a machine uses: the preferred one unless another is clearly faster, and the same at every start."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.kernels.variants import IN_GATE
from twostroke.kernels.cpu import build, choice, variants
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.choice import (
    BY_FLAG,
    MEASURED,
    NOT_BUILT,
    NOT_KEPT,
    NOTHING_BUILT,
    ONLY_ONE,
    ROWS,
    choose_kernels,
    fastest,
    trial_seconds,
    variant_and_reason,
)
from twostroke.kernels.cpu.variants import OVERRIDE


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"first": [1.0, 1.0]}, "first"),
        ({"first": [1.0, 1.0], "second": [0.98, 0.98]}, "first"),
        ({"first": [1.0, 1.0], "second": [0.9, 0.9]}, "second"),
        ({"first": [1.0, 1.0], "second": [0.5, 1.9]}, "first"),
        ({"first": [1.0, 1e-3], "second": [1.5, 5e-4]}, "second"),
        ({"first": [1.0], "second": [0.8], "third": [0.7]}, "third"),
    ],
)
def test_the_preferred_variant_stays_unless_another_is_clearly_faster_over_all_tasks(
    seconds: dict[str, list[float]], chosen: str
) -> None:
    assert fastest(seconds) == chosen


class Trial:
    """Stands in for the measurement: seconds by variant, and how often somebody measured."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.times = 0

    def __call__(self, loaded: Sequence[Kernels]) -> dict[str, tuple[float, ...]]:
        self.times += 1
        return {kernels.variant: (self.seconds[kernels.variant],) for kernels in loaded}


@pytest.fixture
def trial(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """A processor that can run two variants, of which the second is faster; one small file instead of all kernels."""
    sources = tmp_path_factory.mktemp("sources")
    (sources / "empty.cpp").write_text("")
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(
        variants, "_fact_of_cpu", lambda *keys: "flags : avx2 fma f16c avx512f avx512bw avx512vl avx512dq"
    )
    monkeypatch.delenv(OVERRIDE, raising=False)
    trial = Trial(avx512=1.0, avx2=0.5)
    monkeypatch.setattr(choice, "trial_seconds", trial)
    return trial


def test_what_was_measured_decides_at_every_start_whatever_is_faster_then(tmp_path: Path, trial: Trial) -> None:
    assert variant_and_reason(choose_kernels(tmp_path)) == ("avx2", MEASURED)
    trial.seconds["avx2"] = 2.0
    assert variant_and_reason(choose_kernels(tmp_path)) == ("avx2", MEASURED)
    assert trial.times == 1


def test_workers_that_start_at_once_measure_once_and_choose_the_same(tmp_path: Path, trial: Trial) -> None:
    with ThreadPoolExecutor(4) as workers:
        chosen = list(workers.map(choose_kernels, [tmp_path] * 4))
    assert {variant_and_reason(kernels) for kernels in chosen} == {("avx2", MEASURED)}
    assert trial.times == 1


def test_other_sources_another_processor_and_another_compiler_are_measured_again(
    tmp_path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_kernels(tmp_path)
    (build.SOURCES / "empty.cpp").write_text("// changed\n")
    choose_kernels(tmp_path)
    monkeypatch.setattr(choice, "cpu_model", lambda: "another")
    choose_kernels(tmp_path)
    monkeypatch.setattr(choice, "find_compiler", lambda: build.Compiler(("c++",), "another"))
    choose_kernels(tmp_path)
    assert trial.times == 4
    assert len(json.loads((tmp_path / "choice.json").read_text())) == 4


def test_the_user_overrides_what_was_measured(tmp_path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, "avx512")
    assert variant_and_reason(choose_kernels(tmp_path)) == ("avx512", BY_FLAG)
    monkeypatch.setenv(OVERRIDE, "torch")
    assert variant_and_reason(choose_kernels(tmp_path)) == ("torch", BY_FLAG)
    assert trial.times == 0


def test_a_variant_without_a_rival_is_not_measured(
    tmp_path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "_fact_of_cpu", lambda *keys: "flags : avx2 fma f16c")
    assert variant_and_reason(choose_kernels(tmp_path)) == ("avx2", ONLY_ONE)
    assert trial.times == 0


def compiler_that_refuses(folder: Path, pattern: str) -> str:
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\nfor a in "$@"; do case $a in {pattern}) exit 1;; esac; done\nexec c++ "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("refused", "found"),
    [("-mavx512*", ("avx2", NOT_BUILT)), ("-mavx*", ("portable", NOT_BUILT)), ("*", ("torch", NOTHING_BUILT))],
)
def test_where_a_contender_cannot_be_built_the_next_that_can_be_is_used_without_a_measurement(
    tmp_path: Path, trial: Trial, monkeypatch: pytest.MonkeyPatch, refused: str, found: tuple[str, str]
) -> None:
    monkeypatch.setenv("CXX", compiler_that_refuses(tmp_path, refused))
    assert variant_and_reason(choose_kernels(tmp_path / "kernels")) == found
    assert trial.times == 0


def test_a_cache_that_cannot_be_written_leaves_the_preferred_variant(
    tmp_path: Path, trial: Trial, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "choice.json").mkdir()  # root may write everywhere else
    with caplog.at_level(logging.INFO):
        assert variant_and_reason(choose_kernels(tmp_path)) == ("avx512", NOT_KEPT)
    assert "native kernels are not measured: variant=avx512" in caplog.text
    assert trial.times == 0


def test_a_trial_times_every_task_with_every_variant(built_kernels: Mapping[str, Kernels]) -> None:
    loaded = [built_kernels[name] for name in IN_GATE]
    seconds = trial_seconds(loaded)
    assert list(seconds) == [kernels.variant for kernels in loaded]
    for tasks in seconds.values():
        assert len(tasks) == len(ROWS) + 1
        assert all(0 < task < math.inf for task in tasks)


def test_this_machine_chooses_among_what_it_can_run(
    tmp_path: Path, built_kernels: Mapping[str, Kernels], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)
    for name in IN_GATE:
        library = Path(built_kernels[name].library._name)
        (tmp_path / library.name).symlink_to(library)
    chosen = choose_kernels(tmp_path)
    assert chosen is not None
    assert chosen.build == built_kernels[chosen.variant].build
    assert (tmp_path / "choice.json").exists() == (chosen.reason == MEASURED)
