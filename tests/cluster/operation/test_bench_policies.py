"""`python -m tests.trials.bench policies` on real clusters: one utilisation, one round, one policy."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.trials.bench.__main__ import PROGRAM

SMALL = ("--workload", "conversation", "--limit", "20", "--rate", "2", "--length-scale", "0.03125", "--seed", "5")


@pytest.mark.slow
def test_a_real_cluster_is_measured_simulated_and_gone(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    paced = "paced:prefill_tokens_per_s=4000,step_ms=4,page_bytes=1024,max_model_len=65536"
    cluster = ("--prefill", "1", "--decode", "1", "--kv-cache-memory", "4M", "--model", paced, "--warmup", "2")
    once = ("--policies", "round-robin", "--rounds", "1", "--utilisations", "0.5", "--simulate", "--json", str(out))
    assert PROGRAM.main(["policies", *SMALL, *cluster, *once, "--log-dir", str(tmp_path)]) == 0
    assert not [child for child in psutil.Process().children(recursive=True) if "serve" in child.cmdline()]
    said = json.loads(out.read_text())
    (measured,) = said["trials"]
    assert (measured["report"]["completed"], measured["refused"], measured["failed"]) == (20, 0, 0)
    assert 0 < measured["busy"]["workers"]["prefill-0"] < 1
    (simulated,) = said["simulated"]
    (first_tokens,) = simulated["first_tokens"]
    assert first_tokens["answers"] == 20
    assert first_tokens["p50"]["simulated_s"] > 0
    fleet = simulated["fleet"]
    assert (fleet["prefill"], fleet["decode"], fleet["block_size"], fleet["local_prefill"]) == (1, 1, 16, True)
