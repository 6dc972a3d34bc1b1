"""A real run's log fitted and replayed: the same requests, simulated beside real."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tools.cli import main
from twostroke.observability.request_log import AnswerRecord, WorkerRecord, line_of
from twostroke.scheduler.cost import StepCost

COST = StepCost(step_s=0.01, stream_s=1e-4, prompt_token_s=1e-4)
TTFT_S = 0.09


def worker(name: str, role: str) -> WorkerRecord:
    return WorkerRecord(
        at_s=1000.0,
        worker=name,
        role=role,
        epoch="1:a",
        status="serving",
        block_size=16,
        page_bytes=1000,
        pages_total=400,
        step_tokens=512,
        step_target_s=0.05,
        costs=asdict(COST),
    )


def answer(number: int) -> AnswerRecord:
    """Prompts of 640 tokens one after the other, each 64 ms of prefill and a step."""
    return AnswerRecord(
        request_id=f"r{number}#0",
        arrival_s=900.0 + number,
        outcome="length",
        prompt_tokens=640,
        output_tokens=3,
        block_size=16,
        blocks="".join(f"{100 * number + block:016x}" for block in range(40)),
        policy="least-requests",
        attempts=1,
        cached_tokens=160,
        ttft_s=TTFT_S,
    )


def test_a_log_is_fitted_and_replayed_beside_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, profile, written = tmp_path / "requests.log", tmp_path / "fleet.json", tmp_path / "out.json"
    records = [worker("prefill-0", "prefill"), *map(answer, range(20)), worker("decode-0", "decode")]
    log.write_text("".join(map(line_of, records)), encoding="utf-8")
    assert main(["simulate", "--fit", str(log), "--profile", str(profile)]) == 0
    assert "1 prefill + 1 decode workers, pages of 16 tokens, 100.0 us a prompt token" in capsys.readouterr().out
    replay = ["simulate", "--trace", str(log), "--profile", str(profile), "--policies", "round-robin"]
    assert main([*replay, "--json", str(written)]) == 0
    shown = capsys.readouterr().out
    assert "simulated over real" in shown
    (found,) = json.loads(written.read_text(encoding="utf-8"))["replay"]
    assert (found["policy"], found["answers"]) == ("least-requests", 20)
    assert found["hits"] == {"real": 0.25, "simulated": 0.0}, "nobody asked for these blocks before"
    for share in ("p50", "p90"):
        assert found[share]["real_s"] == pytest.approx(TTFT_S)
        assert found[share]["simulated_s"] >= COST.of_prompt(640, 0, 512)
        assert found[share]["ratio"] == pytest.approx(found[share]["simulated_s"] / TTFT_S)
        assert 0.7 < found[share]["ratio"] < 1.3


def test_a_part_of_a_log_is_held_against_that_part(tmp_path: Path) -> None:
    log, profile, written = tmp_path / "requests.log", tmp_path / "fleet.json", tmp_path / "out.json"
    records = [worker("prefill-0", "prefill"), worker("decode-0", "decode"), *map(answer, range(20))]
    log.write_text("".join(map(line_of, records)), encoding="utf-8")
    assert main(["simulate", "--fit", str(log), "--profile", str(profile)]) == 0
    arguments = ["--trace", str(log), "--profile", str(profile), "--policies", "round-robin", "--limit", "6"]
    assert main(["simulate", *arguments, "--json", str(written)]) == 0
    (found,) = json.loads(written.read_text(encoding="utf-8"))["replay"]
    assert found["answers"] == 6
