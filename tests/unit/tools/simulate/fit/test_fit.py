"""A fleet from a request log: every number of the profile has its line in the log."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from tools.simulate.fit.fitting import Log, fitted, parse_log
from tools.simulate.fleet.event_queue import EventQueue
from tools.simulate.fleet.results import WorkerUse
from tools.simulate.fleet.shape import TierShape
from tools.simulate.fleet.worker.host import FastParts, SharedFleet, SimulatedHost
from twostroke.base.errors import ConfigError
from twostroke.base.ids import Epoch, WorkerId
from twostroke.base.lifetime import Instant
from twostroke.config import Role
from twostroke.kv_cache.tier import Tier
from twostroke.observability.request_log import AnswerRecord, LinkRecord, WorkerRecord, line_of
from twostroke.scheduler.cost import StepCost

PREFILL_COST = StepCost(prompt_token_s=1e-4, prompt_pair_s=1e-9, step_s=9.0)
DECODE_COST = StepCost(prompt_token_s=5e-4, step_s=0.02, stream_s=1e-3, context_token_s=1e-7)


def worker(name: str, role: str, cost: StepCost, **said: Any) -> WorkerRecord:
    link = LinkRecord(worker="prefill-0", latency_s=0.001, bytes_per_s=2e9)
    known = {
        "at_s": 100.0,
        "epoch": "1:a",
        "status": "serving",
        "block_size": 16,
        "page_bytes": 1_000_000,
        "pages_total": 500 if role == "decode" else 900,
        "step_tokens": 256,
        "step_target_s": 0.05,
        "links": (link,) if role == "decode" else (),
    }
    return WorkerRecord(worker=name, role=role, costs=asdict(cost), **{**known, **said})


def answer(number: int, **said: Any) -> AnswerRecord:
    """An idle source: 160 tokens computed in 16 ms and a bit, a page over the wire in 0.5 ms, the rest is calls."""
    begin_s = 100.0 + number
    computing_s = PREFILL_COST.of_prompt(160, 0, 256)
    admitted_s = begin_s + 0.009
    first_page_s = admitted_s + 0.004 + computing_s + 0.0005
    known = {
        "outcome": "length",
        "prompt_tokens": 160,
        "output_tokens": 5,
        "block_size": 16,
        "blocks": "0" * 160,
        "policy": "kv",
        "attempts": 1,
        "decode": "decode-0",
        "source": "prefill-0",
        "forecast": {"queue_s": 0.0, "computed_tokens": 160},
        "ttft_s": 0.503,
        "instants": {
            Instant.RECEIVED: begin_s,
            Instant.ROUTED: begin_s + 0.003,
            Instant.OPENED: begin_s + 0.008,
            Instant.ADMITTED: admitted_s,
            Instant.FIRST_PAGE: first_page_s,
            Instant.FIRST_TOKEN: begin_s + 0.5,
        },
    }
    return AnswerRecord(request_id=f"r{number}#0", arrival_s=begin_s, **{**known, **said})


WORKERS = (
    worker("prefill-0", "prefill", PREFILL_COST),
    worker("prefill-1", "prefill", PREFILL_COST),
    worker("decode-0", "decode", DECODE_COST),
)


def test_costs_links_pools_and_counts_are_those_of_the_workers() -> None:
    shape = fitted(Log("a log", tuple(map(answer, range(5))), WORKERS))
    assert (shape.prefill, shape.decode) == (2, 1)
    assert (shape.prefill_pages, shape.decode_pages, shape.block_size, shape.page_bytes) == (900, 500, 16, 1_000_000)
    assert (shape.step_tokens, shape.step_target_s, shape.link_bytes_per_s) == (256, 0.05, 2e9)
    assert shape.cost == replace(DECODE_COST, prompt_token_s=1e-4, prompt_pair_s=1e-9)
    assert shape.of_role(Role.PREFILL).cost == shape.cost
    assert shape.of_role(Role.DECODE).cost == DECODE_COST


def test_each_role_runs_steps_of_its_own_length_at_its_own_cost() -> None:
    """A decode worker's prompts would take five times as long as they do at a prefill worker's price."""
    prefill = worker("prefill-0", "prefill", replace(PREFILL_COST, prompt_token_s=5e-4), step_tokens=512)
    decode = worker("decode-0", "decode", replace(DECODE_COST, prompt_token_s=1e-4), step_tokens=128)
    shape = fitted(Log("a log", (), (prefill, decode)))
    steps = {role: shape.of_role(role).step_tokens for role in (Role.PREFILL, Role.DECODE)}
    assert steps == {Role.PREFILL: 512, Role.DECODE: 128}
    prompts_s = {role: shape.of_role(role).cost.of_prompt(100, 0, 128) for role in (Role.PREFILL, Role.DECODE)}
    assert prompts_s[Role.PREFILL] > 4.9 * prompts_s[Role.DECODE]


def test_decode_workers_that_computed_no_prompt_cost_what_prefill_workers_do() -> None:
    silent = worker("decode-0", "decode", replace(DECODE_COST, prompt_token_s=0.0))
    shape = fitted(Log("a log", (), (*WORKERS[:2], silent)))
    assert shape.of_role(Role.DECODE).cost == replace(DECODE_COST, prompt_token_s=1e-4, prompt_pair_s=1e-9)


def test_page_times_of_tiers_are_those_of_the_workers_that_have_them() -> None:
    tiered = tuple(replace(each, tiers={"host": 1e-3, "disk": 2e-3}) for each in WORKERS[:2])
    shape = fitted(Log("a log", (), (*tiered, replace(WORKERS[2], tiers={"host": 1e-5, "disk": 4e-3}))))
    times = {
        role: tuple(shape.of_role(role).tier_page_s(tier) for tier in (Tier.HOST, Tier.DISK))
        for role in (Role.PREFILL, Role.DECODE)
    }
    assert times == {Role.PREFILL: (1e-3, 2e-3), Role.DECODE: (1e-5, 4e-3)}
    assert shape.tiers.host_bytes == 0
    assert fitted(Log("a log", (), WORKERS)).tiers == TierShape()


def test_a_page_takes_time_by_its_bytes_where_roles_have_other_forms_and_one_has_said_its_time() -> None:
    prefill = worker("prefill-0", "prefill", PREFILL_COST, page_bytes=2_000_000, conversion_page_s=1e-3)
    shape = fitted(Log("a log", (), (prefill, replace(WORKERS[2], tiers={"disk": 2e-3}))))
    assert shape.of_role(Role.DECODE).tier_page_s(Tier.DISK) == pytest.approx(2e-3)
    assert shape.of_role(Role.PREFILL).tier_page_s(Tier.DISK) == pytest.approx(4e-3)


def test_a_source_that_was_quicker_than_predicted_makes_pulls_no_slower() -> None:
    """Half of the answers came 20 ms before what their source would have needed, the others 20 ms after."""

    def off_by(seconds: float, number: int) -> AnswerRecord:
        usual = answer(number)
        first_page_s = usual.instants[Instant.FIRST_PAGE] + seconds
        return replace(usual, instants={**usual.instants, Instant.FIRST_PAGE: first_page_s})

    answers = [off_by(0.02 if number % 2 else -0.02, number) for number in range(10)]
    assert fitted(Log("a log", tuple(answers), WORKERS)).delays.pull_s == pytest.approx(0.002)


def test_sources_that_held_the_first_pages_say_best_what_a_pull_takes() -> None:
    """Twenty blocks are pulled and ten computed: the first ten are announced at once, without a step."""
    usual = answer(3)
    instants = {**usual.instants, Instant.FIRST_PAGE: usual.instants[Instant.ADMITTED] + 0.0065}
    held = replace(usual, forecast={**usual.forecast, "pulled_blocks": 20.0}, instants=instants)
    delays = fitted(Log("a log", (*map(answer, range(3)), held), WORKERS)).delays
    assert delays.pull_s == pytest.approx(0.003), "there and back, and a page over the wire in half a millisecond"


def test_delays_are_what_predicted_work_does_not_explain() -> None:
    busy = answer(9, forecast={"queue_s": 3.0, "computed_tokens": 160}, instants={})
    loading = [
        answer(
            number,
            forecast={"queue_s": 0.0, "computed_tokens": 0, "load_s": 0.3},
            instants={Instant.ADMITTED: 100.0, Instant.FIRST_PAGE: 100.3},
        )
        for number in range(10, 20)
    ]
    delays = fitted(Log("a log", (*map(answer, range(5)), busy, *loading), WORKERS)).delays
    assert delays.frontend_s == pytest.approx(0.003)
    assert delays.open_s == pytest.approx(0.0025), "there and back"
    assert delays.pull_s == pytest.approx(0.002), "there and back"
    assert delays.token_s == pytest.approx(0.006), "from the worker's clock to the router's"


def test_only_the_last_line_of_a_worker_counts_and_the_dead_do_not() -> None:
    early = worker("decode-0", "decode", replace(DECODE_COST, step_s=7.0), at_s=50.0)
    gone = worker("prefill-7", "prefill", replace(PREFILL_COST, prompt_token_s=7.0), at_s=10.0)
    draining = worker("prefill-8", "prefill", replace(PREFILL_COST, prompt_token_s=7.0), status="draining")
    assert fitted(Log("a log", (), (early, gone, draining, *WORKERS))) == fitted(Log("a log", (), WORKERS))


def test_several_runs_of_one_fleet_make_one_fleet() -> None:
    runs = [
        Log(f"run {step_s}", (), (*WORKERS[:2], worker("decode-0", "decode", replace(DECODE_COST, step_s=step_s))))
        for step_s in (0.02, 0.021, 0.9)
    ]
    shape = fitted(*runs)
    assert (shape.prefill, shape.decode) == (2, 1)
    assert shape.cost.step_s == 0.021


@pytest.mark.parametrize("step_tokens", [32, 128, 256])
def test_a_fitted_worker_runs_steps_as_long_as_the_real_one(step_tokens: int) -> None:
    workers = tuple(replace(each, step_tokens=step_tokens) for each in WORKERS)
    shape = fitted(Log("a log", (), workers))
    host = SimulatedHost(
        SharedFleet(EventQueue(), shape, FastParts()),
        WorkerId("decode-0"),
        Epoch(1, 1),
        WorkerUse(worker="decode-0", role=Role.DECODE),
    )
    assert host.scheduler.step_tokens == step_tokens
    assert shape.local_prefill


def test_without_prefill_workers_decode_workers_say_what_a_prompt_costs() -> None:
    shape = fitted(Log("a log", (), WORKERS[2:]))
    assert (shape.prefill, shape.cost) == (0, DECODE_COST)


def test_a_log_that_says_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match="no line of a worker"):
        fitted(Log("a log", (answer(0),), ()))
    with pytest.raises(ConfigError, match="no line of a decode worker that serves"):
        fitted(Log("a log", (), WORKERS[:2]))
    silent = worker("decode-0", "decode", StepCost())
    with pytest.raises(ConfigError, match="what a prompt token costs"):
        fitted(Log("a log", (), (silent,)))
    with pytest.raises(ConfigError, match="what a step costs"):
        fitted(Log("a log", (), (*WORKERS[:2], silent)))


def test_a_log_is_read_line_by_line_and_errors_name_theirs() -> None:
    lines = [line_of(answer(0)), "\n", line_of(WORKERS[0])]
    assert parse_log(lines, "a log") == Log("a log", (answer(0),), WORKERS[:1])
    with pytest.raises(ConfigError, match=r"a log:4: record must be one of"):
        parse_log([*lines, '{"record": "thing"}'], "a log")


def test_a_fleet_of_two_forms_has_both_pages_and_the_seconds_of_a_conversion() -> None:
    prefill = [worker("prefill-0", "prefill", PREFILL_COST, page_bytes=1_900_000, conversion_page_s=0.002)]
    log = Log("log", tuple(answer(number) for number in range(5)), (*prefill, WORKERS[2]))
    shape = fitted(log)
    assert (shape.page_bytes, shape.prefill_page_bytes, shape.conversion_page_s) == (1_000_000, 1_900_000, 0.002)
    assert shape.kv_form(Role.DECODE).takes(shape.kv_form(Role.PREFILL))
    assert fitted(Log("log", log.answers, WORKERS)).prefill_page_bytes is None
