"""`tests.trials.bench determinism`: what it says of a tiny model with and without --deterministic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.trials.bench import determinism
from tests.trials.bench.kernels.test_kernels import tiny

__all__ = ["tiny"]


def test_steady_engines_keep_what_they_claim(arguments: Any, tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    flags = ["--engines", "float32", "--streams", "3", "--tokens", "4", "--repeats", "1", "--json", str(report)]
    assert determinism.run(arguments("determinism", "--model", str(tiny), *flags)) == 0
    plain, steady = json.loads(report.read_text())["results"]
    assert [plain["flag"], steady["flag"], steady["claim"]["holds"]] == [False, True, True]
    assert {way["way"] for way in steady["shares"]} >= {"in a crowd", "moved in the middle"}
    assert all(way["identical"] == way["bit_identical"] == 1 for way in steady["shares"])
    assert set(plain["ratio"].values()) == {1.0}
