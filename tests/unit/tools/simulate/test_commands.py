"""`twostroke simulate` from its flags to its files, with real runs of few requests."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tools.cli import main
from tools.simulate.fleet.shape import Death, DraftShape, Faults, FleetShape, TierShape
from tools.simulate.options import profile_text, read_profile
from twostroke.base.errors import ConfigError
from twostroke.base.ids import WorkerId

REQUESTS = 24
SMALL = ["--workload", "conversation", "--limit", str(REQUESTS), "--prefill", "2", "--decode", "2", "--rate", "1"]


def simulated(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What the command wrote as JSON."""
    written = tmp_path / "out.json"
    assert main(["simulate", *arguments, "--json", str(written)]) == 0
    return dict(json.loads(written.read_text(encoding="utf-8")))


def simulated_and_drawn(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What the command wrote: JSON, and a page, whose figures take longer to draw than most runs."""
    page = tmp_path / "out.html"
    found = simulated(tmp_path, *arguments, "--html", str(page))
    return found, page.read_text(encoding="utf-8")


def figures(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_policies_are_compared_at_every_pace_with_round_robin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, page = simulated_and_drawn(tmp_path, *SMALL, "--policies", "kv", "--rate-scale", "1,2", "--slo-ttft", "8")
    assert [(run["variant"], run["rate_scale"]) for run in found["runs"]] == [
        ("round-robin", 1.0),
        ("kv", 1.0),
        ("round-robin", 2.0),
        ("kv", 2.0),
    ]
    for run in found["runs"]:
        assert (run["requests"], run["completed"], run["refused"], run["lost"]) == (REQUESTS, REQUESTS, 0, 0)
        assert 0 < run["utilisation"] < 1
        assert 0 < run["ttft_p50_s"] <= run["ttft_p90_s"] <= run["ttft_p99_s"]
        assert 0 < run["itl_p50_s"] <= run["itl_p99_s"]
        assert run["unequal_indexes"] == 0
    assert found["runs"][0]["p90_ratio"] == 1.0
    assert found["runs"][1]["requests_per_s"] < found["runs"][3]["requests_per_s"]
    assert 0 < found["oracle_hit_rate"] < 1
    assert len(figures(page)) == 2 + 2 * 4
    shown = capsys.readouterr().out
    assert "round-robin" in shown
    assert "of oracle" in shown
    assert "a first token within 8 s" in shown


def test_tiers_below_the_pages_bring_up_what_small_pages_forget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [*SMALL, "--policies", "round-robin", "--rate", "3.4", "--limit", "150", "--decode-pool-tokens", "140000"]
    small += ["--pool-tokens", "140000"]
    tiers = ["--host-cache", "40G", "--disk-cache", "1T", "--disk-page-s", "0.02"]
    (without,), (tiered,) = (simulated(tmp_path, *small, *more)["runs"] for more in ([], tiers))
    assert without["host_rate"] == without["disk_rate"] == 0
    assert tiered["host_rate"] > 0
    assert tiered["hit_rate"] > without["hit_rate"]
    assert tiered["unequal_indexes"] == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "on host at 6.4 ms a page; below the pages of each" in shown
    assert "on disk at 20 ms a page" in shown


def test_answers_of_workers_that_draft_come_in_fewer_steps(tmp_path: Path) -> None:
    answers = [*SMALL, "--policies", "round-robin"]
    drafts = ["--acceptance", "0.9,0.8", "--draft-share", "0.9"]
    (without,), (drafting,) = (simulated(tmp_path, *answers, *more)["runs"] for more in ([], drafts))
    assert drafting["completed"] == without["completed"] == REQUESTS
    assert drafting["itl_mean_s"] < 0.6 * without["itl_mean_s"]


def test_a_utilisation_is_met_by_the_policy_that_it_is_of(tmp_path: Path) -> None:
    found = simulated(tmp_path, *SMALL, "--limit", "40", "--policies", "round-robin", "--utilisation", "0.5")
    assert found["runs"][0]["utilisation"] == pytest.approx(0.5, rel=0.05)


def test_the_highest_rate_is_found_for_every_policy(tmp_path: Path) -> None:
    arguments = ["--limit", "40", "--policies", "least-requests", "--find-rate", "15", "--precision", "0.5"]
    found, page = simulated_and_drawn(tmp_path, *SMALL, *arguments)
    assert [each["variant"] for each in found["highest_rates"]] == ["round-robin", "least-requests"]
    for each in found["highest_rates"]:
        assert 0 < each["keeps"] < each["breaks"]
        assert each["p90_s"] <= 15
    assert len(figures(page)) == 1


def test_a_plan_names_counts_and_where_splitting_pays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, page = simulated_and_drawn(
        tmp_path,
        "plan",
        *("--workload", "conversation", "--limit", str(REQUESTS), "--rate", "1"),
        *("--slo-ttft", "20", "--slo-itl", "0.1", "--loads", "0.5,2"),
    )
    assert found["smallest"]["prefill"] >= 1
    assert found["smallest"]["decode"] >= 1
    enough = [each for each in found["tried"] if each["counts"] == found["smallest"]]
    assert enough[0]["attainment"] >= 0.9
    assert len(found["crossover"]) == 2
    assert len(figures(page)) == 1
    shown = capsys.readouterr().out
    assert "needs" in shown
    assert "splitting" in shown


def test_a_profile_comes_back_as_it_was_written_and_flags_go_before_it(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    deaths = (Death(worker=WorkerId("prefill-0"), at_s=1.0),)
    shape = FleetShape(
        prefill=3,
        decode=1,
        noise=0.1,
        block_size=256,
        tiers=TierShape(disk_bytes=1 << 30),
        drafts=DraftShape(proposed=(0.9, 0.5), right=(0.7, 0.4)),
        faults=Faults(deaths=deaths),
    )
    path.write_text(profile_text(shape), encoding="utf-8")
    assert read_profile(path) == shape
    arguments = [*SMALL[:4], "--decode", "2", "--rate", "1", "--profile", str(path), "--policies", "round-robin"]
    found = simulated(tmp_path, *arguments)
    fleet = found["fleet"]
    assert (fleet["prefill"], fleet["decode"], fleet["noise"], fleet["block_size"]) == (3, 2, 0.1, 512)
    assert fleet["prefill_pages"] == FleetShape().prefill_pages // 2, "as many tokens in pages of twice the size"
    path.write_text('{"prefil": 3}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"fleet\.json: .*unknown keys \['prefil'\]"):
        read_profile(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a JSON file"):
        read_profile(path)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "one of --trace FILE and --workload NAME is needed"),
        (["--trace", "/nowhere.jsonl"], "--trace /nowhere.jsonl: No such file or directory"),
        (["--workload", "chat"], "--workload must be one of conversation"),
        ([*SMALL, "--policies", "kv,best"], "got 'best'"),
        ([*SMALL, "--of", "best", "--utilisation", "0.5"], "--of must be of kv"),
        ([*SMALL, "--length-scale", "1e-9"], "leaves less than a token of a block of 512"),
        ([*SMALL, "--rate-scale", ","], "--rate-scale must be numbers separated by commas, got ','"),
        ([*SMALL, "--decode", "0"], "needs decode of 1 or more, got 0"),
        ([*SMALL, "--prefill", "0", "--utilisation", "0.5"], "--prefill must be 1 or more"),
        ([*SMALL, "--slo-ttft", "0.01"], "--slo-ttft 0.01 is impossible: on an empty fleet the quickest"),
        ([*SMALL, "--slo-itl", "0.001"], "a step with one stream takes"),
        ([*SMALL, "--slo-ttft", "-1"], "--slo-ttft must be a positive number of seconds"),
        ([*SMALL, "--find-rate", "0.01"], "--find-rate 0.01 is impossible"),
        ([*SMALL, "--admission"], "--admission refuses by --slo-ttft"),
        ([*SMALL, "--rate-scale", "1,fast"], "--rate-scale must be numbers separated by commas"),
        ([*SMALL, "--rate-scale", "1", "--utilisation", "0.5"], "exclude each other"),
        ([*SMALL, "--pool-tokens", "100"], "does not hold one block of 512 tokens"),
        ([*SMALL, "--event-faults", "1.5"], "--event-faults must be a share"),
        ([*SMALL, "--rate-scale", "nan"], "--rate-scale must be numbers separated by commas, got 'nan'"),
        ([*SMALL, "--rate", "1e-9"], "s lie between its first and its last request"),
        ([*SMALL, "--decode-pool-tokens", "512"], "all pages of a decode worker hold 512"),
        ([*SMALL, "--html", "/nowhere/page.html"], "--html /nowhere/page.html: the directory does not exist"),
        ([*SMALL, "--policies", "round-robin", "--json", "/dev/full"], "/dev/full cannot be written: No space left"),
        (["--fit", "/nowhere.log"], "--fit needs --profile FILE"),
        ([*SMALL, "--fit", "/nowhere.log"], "--workload would be ignored: --fit reads a log"),
        (["--trace", "/nowhere.jsonl", "--rate", "3.4"], "--rate would be ignored: a trace has times of its own"),
        (
            ["--rate", "2", "plan", "--trace", "x", "--slo-ttft", "9", "--slo-itl", "1"],
            "--rate would be ignored: a trace",
        ),
        ([*SMALL, "--find-rate", "9", "--rate-scale", "2"], "--rate-scale would be ignored: --find-rate looks for"),
        ([*SMALL, "--find-rate", "9", "--slo-ttft", "2"], "--slo-ttft would be ignored: --find-rate itself says"),
        ([*SMALL, "--of", "kv"], "--of would be ignored: it needs --utilisation"),
        ([*SMALL, "--precision", "0.1"], "--precision would be ignored: it needs --find-rate"),
        ([*SMALL, "--host-page-s", "0.1"], "--host-page-s would be ignored: it needs --host-cache"),
        ([*SMALL, "--disk-page-s", "0.1"], "--disk-page-s would be ignored: it needs --disk-cache"),
        ([*SMALL, "--disk-cache", "1G", "--disk-page-s", "0"], "--disk-page-s must be positive and finite, got 0"),
        ([*SMALL, "--disk-cache", "100M"], "--disk-cache 104857600 is less than the 320000000 bytes"),
        ([*SMALL, "--acceptance", "0.9,1.5"], "--acceptance must be from 0 to 1, got [0.9, 1.5]"),
        ([*SMALL, "--acceptance", "often"], "--acceptance must be numbers separated by commas, got 'often'"),
        ([*SMALL, "--acceptance", ""], "--acceptance must be from 0 to 1, got []"),
        ([*SMALL, "--acceptance", "0.9", "--draft-share", "2"], "--draft-share must be from 0 to 1, got [2.0]"),
        ([*SMALL, "--draft-share", "0.5"], "--draft-share needs --acceptance"),
        ([*SMALL, "--steps", "x"], "--steps would be ignored: it is a part of --fit"),
        (["plan", *SMALL, "--slo-ttft", "0.01", "--slo-itl", "1"], "--slo-ttft 0.01 is impossible"),
        (["plan", *SMALL, "--slo-ttft", "9", "--slo-itl", "1", "--attainment", "2"], "--attainment must lie between"),
        (["plan", *SMALL, "--slo-ttft", "9", "--slo-itl", "1", "--loads", "1,inf"], "--loads must be numbers"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    shown = capsys.readouterr().err
    assert complaint in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("profile", "complaint"),
    [
        ("[]", "FleetShape must be an object, got list"),
        ('{"cost": {"step_s": -1}}', "needs step_s of 0 or more, got -1"),
        ('{"cost": {"step_s": 0.1}}', "steps must take time"),
        ('{"prefill": true}', "FleetShape.prefill must be int, got True"),
        ('{"noise": true}', "FleetShape.noise must be float, got True"),
        ('{"noise": NaN}', "needs noise of 0 or more, got nan"),
        ('{"delays": {"open_s": Infinity}}', "needs open_s of 0 or more, got inf"),
        ('{"heartbeat_s": 1%s}' % ("0" * 400), "FleetShape.heartbeat_s is too large a number"),
        ('{"drafts": {"proposed": [], "right": []}}', "drafts.proposed must be shares from 0 to 1, got []"),
        ('{"drafts": {"proposed": [0.5], "right": [2]}}', "drafts.right must be shares from 0 to 1, got [2.0]"),
        ('{"drafts": {"proposed": [0.5, 0.6], "right": [0.5]}}', "drafts.proposed must not rise"),
        ('{"tiers": {"host_page_s": 0}}', "tiers.host_page_s must be positive"),
        ('{"tiers": {"disk_bytes": 5}}', "--disk-cache 5 is less than the"),
        ('{"tiers": {"host_bytes": -5}}', "needs tiers.host_bytes of 0 or more"),
        ('{"faults": {"deaths": [{"worker": "decode-9", "at_s": 1}]}}', "decode-9 is not in the simulated fleet"),
        ('{"faults": {"router_restarts": [{"router": 1, "at_s": 1}]}}', "router 1 is not in the simulated fleet"),
    ],
)
def test_a_profile_of_no_possible_fleet_is_refused_with_what_is_wrong(
    profile: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(profile, encoding="utf-8")
    assert main(["simulate", *SMALL, "--profile", str(path)]) == 2
    shown = capsys.readouterr().err
    assert f"--profile {path}: " in shown
    assert complaint in shown


def test_a_prompt_that_no_prefill_worker_has_room_for_is_computed_where_it_is_decoded(tmp_path: Path) -> None:
    found = simulated(tmp_path, *SMALL, "--policies", "round-robin", "--pool-tokens", "1024")
    assert (found["runs"][0]["completed"], found["runs"][0]["lost"]) == (REQUESTS, 0)


def test_a_single_request_can_be_simulated(tmp_path: Path) -> None:
    found = simulated(tmp_path, *SMALL[:2], "--limit", "1", "--policies", "kv")
    assert [run["completed"] for run in found["runs"]] == [1, 1]


def test_a_malformed_row_is_named_by_line_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    row = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    trace.write_text(row + row.replace("600", "-3"), encoding="utf-8")
    assert main(["simulate", "--trace", str(trace)]) == 2
    assert f"{trace}:2: input_length must be a positive integer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rate", "complaint"),
    [
        ("1e-300", "s lie between its first and its last request"),
        ("1e-3", "one worker of each role is enough, and there is nothing to simulate"),
        ("1e3", "workers by formula, and fleets of more than 256 are not simulated: check its rate"),
        ("1e6", "--rate 1e+06 is too high for conversation"),
        ("1e300", "--rate 1e+300 is too high for conversation"),
    ],
)
def test_a_plan_of_an_absurd_rate_ends_at_once(rate: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    begun_s = time.thread_time()
    arguments = ["--workload", "conversation", "--limit", "100", "--rate", rate, "--slo-ttft", "5", "--slo-itl", "0.05"]
    assert main(["simulate", "plan", *arguments]) == 2
    assert complaint in capsys.readouterr().err
    assert time.thread_time() - begun_s < 10
