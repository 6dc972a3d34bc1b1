"""`make gpu` on a machine without a GPU: it runs what a CPU can, says what it did not run, and needs torch alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.trials.gpu.report import Report, Row

WITH_TORCH_ALONE = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Missing())
runpy.run_module("tests.trials.gpu.bench", run_name="__main__")
"""
MISSING = {
    "ray", "grpc", "google", "transformers", "safetensors", "tokenizers", "xxhash", "msgpack", "aiohttp",
    "llguidance", "prometheus_client", "starlette", "uvicorn", "rich", "pytest", "hypothesis",
}  # fmt: skip


PASSED_BY_ALL = {
    "recorded steps, streams as the reference's",
    "a sum over ranks, recorded and replayed",
    "2 ranks draw what one does",
    "split run over shared host memory, equal streams",
}
IN_GATE = ("kernels", "decode", "8B", "split")
"""How the sections begin that take a second each. The others check in the interpreter what `tests/unit/kernels/triton`
checks there, too."""


@pytest.mark.parametrize(
    ("sections", "passes"),
    [
        pytest.param(IN_GATE, {"split run over shared host memory, equal streams"}, id="of the gate"),
        pytest.param((), PASSED_BY_ALL, id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the whole bench takes minutes of a GPU: make gpu")
def test_the_bench_runs_its_half_without_a_gpu_and_without_other_packages(
    tmp_path: Path, sections: tuple[str, ...], passes: set[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITH_TORCH_ALONE.format(missing=MISSING), *sections],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OUT": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "NOT RUN  step of an 8B-shaped model over its byte floor: no GPU here" in done.stdout
    assert "FAIL" not in done.stdout
    facts = json.loads((tmp_path / "gpu.json").read_text())
    passed = [row["what"] for row in facts["rows"] if row["passed"]]
    assert any("heads of 64" in what for what in passed)
    assert passes <= set(passed)
    assert facts["failures"] == []


def test_one_failing_section_leaves_the_others_and_the_exit_status_tells(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()

    def broken(_report: Report) -> object:
        yield Row("before", "1 us", 0.9, ">= 0.80", passed=True)
        raise RuntimeError("no such kernel")

    report.section("broken", broken)  # type: ignore[arg-type]
    assert report.exit_code == 1
    report.section("good", lambda _report: iter([Row("after", "2 us")]))
    report.print_table("a machine")
    said = capsys.readouterr().out
    table = said[said.index("=== a machine") :]
    assert [line.split()[0] for line in table.splitlines()] == ["===", "before", "after", "FAILED", "==="]
    assert "broken: RuntimeError: no such kernel" in table


def test_a_missed_mark_fails_the_run() -> None:
    report = Report()
    report.section("slow", lambda _report: iter([Row("decode", "9 us", 0.5, ">= 0.80", passed=False)]))
    assert report.exit_code == 1
    assert Report().exit_code == 0


def test_only_the_sections_that_are_asked_for_run_and_what_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(wanted=("decode", "split"))
    for name in ("ceilings", "decode attention", "prefill attention", "split run"):
        row = Row(name.upper(), "1 us")
        report.section(name, lambda _report, row=row: iter([row]), is_needed=name == "ceilings")  # type: ignore[misc]
    assert [row.what for row in report.rows] == ["CEILINGS", "DECODE ATTENTION", "SPLIT RUN"]
    report.print_table("a machine")
    assert "NOT RUN  prefill attention: not asked for" in capsys.readouterr().out


def test_no_other_package_of_the_name_hides_the_bench(tmp_path: Path) -> None:
    stranger = tmp_path / "tests"
    stranger.mkdir()
    (stranger / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", "import tests.trials.gpu.report"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
