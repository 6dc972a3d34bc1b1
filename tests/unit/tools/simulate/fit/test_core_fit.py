"""What a profile of a host says of its steps: costs alone, and how many times as long they take in company."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.simulate.fit.core_fit import fitted_cores, read_steps, steps_of
from twostroke.base.errors import ConfigError
from twostroke.scheduler.cost import StepCost

COST = StepCost(
    step_s=0.008, stream_s=0.001, context_token_s=1e-6, prompt_step_s=0.004, prompt_token_s=0.0005, prompt_pair_s=1e-7
)
BORROWED, BESIDE, BETWEEN_US = 0.6, 1.25, 900.0
KERNELS = 40

Event = dict[str, Any]


def step(
    pid: int, start_us: float, facts: dict[str, float], times: float, threads: int, until_us: float = math.inf
) -> tuple[list[Event], float]:
    """A step, all of it kernels, each `times` as long as alone if it begins before `until_us`; its events, its end."""
    streams_s = COST.of_streams(int(facts["streams"]), int(facts["context_tokens"]))
    alone_s = streams_s + COST.of_prompts(
        facts["prompt_tokens"] > 0, int(facts["prompt_tokens"]), facts["prompt_pairs"]
    )
    rows = int(facts["streams"] + facts["prompt_tokens"])
    kernels, at_us = [], start_us
    for _ in range(KERNELS):
        took_us = 1e6 * alone_s / KERNELS * (times if at_us < until_us else 1.0)
        args = {"rows": rows, "threads": threads, "flops": alone_s, "bytes": 1}
        one = {"ph": "X", "name": "product", "cat": "kernel", "pid": pid, "tid": 1, "ts": at_us, "args": args}
        kernels.append({**one, "dur": took_us})
        at_us += took_us
    whole = {"ph": "X", "name": "step", "pid": pid, "tid": 1, "ts": start_us, "dur": at_us - start_us, "args": facts}
    return [whole, *kernels], at_us


def host() -> Iterator[Event]:
    """A prefill and a decode worker: each alone, then on a borrowed core, then both at once."""
    yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "prefill-0"}}
    prompts = [
        {"streams": 0, "context_tokens": 0, "prompt_tokens": tokens, "prompt_pairs": pairs}
        for tokens, pairs in ((128, 8192.0), (112, 60000.0), (96, 20000.0), (80, 70000.0))
    ]
    streams = [
        {"streams": count, "context_tokens": context, "prompt_tokens": 0, "prompt_pairs": 0.0}
        for count, context in ((2, 2000), (3, 3500), (2, 3000), (3, 300))
    ]
    at_us = 0.0
    for pid, kinds in ((1, prompts), (2, streams)):
        for times, threads in ((1.0, 1), (BORROWED, 2)):
            for facts in kinds:
                events, end_us = step(pid, at_us, facts, times, threads)
                yield from events
                at_us = end_us + BETWEEN_US
        at_us += 1e6
    for prompt, stream in zip(prompts, streams, strict=True):
        begun_us = at_us
        events, at_us = step(1, begun_us, prompt, BESIDE, 1)
        yield from events
        end_us = begun_us
        while end_us < at_us:
            events, end_us = step(2, end_us, stream, BESIDE, 1, until_us=at_us)
            yield from events
        at_us = end_us + 1e6


def test_speeds_and_costs_are_found_again() -> None:
    found = fitted_cores(steps_of(host()), COST)
    for speeds in (found.cores.streams, found.cores.prompts):
        assert speeds.borrowed == pytest.approx(BORROWED, rel=0.02)
        assert speeds.beside == pytest.approx(BESIDE, rel=0.05)
    for name in ("step_s", "stream_s", "prompt_token_s"):
        assert getattr(found.cost, name) == pytest.approx(getattr(COST, name), rel=0.1)
    assert found.noise < 0.05


def test_what_steps_that_are_all_alike_leave_open_is_as_the_workers_say() -> None:
    """All prompts in chunks of one size: only the sum of what a step and its tokens cost is seen."""
    facts = {"streams": 0, "context_tokens": 0, "prompt_tokens": 128, "prompt_pairs": 8192.0}
    alike = [event for number in range(30) for event in step(1, number * 1e6, facts, 1.0, 1)[0]]
    stream = {"streams": 1, "context_tokens": 500, "prompt_tokens": 0, "prompt_pairs": 0.0}
    alike += [event for number in range(30) for event in step(2, 1e9 + number * 1e4, stream, 1.0, 1)[0]]
    found = fitted_cores(steps_of(alike), COST).cost
    assert found.of_prompts(1, 128, 8192.0) == pytest.approx(COST.of_prompts(1, 128, 8192.0), rel=0.02)
    assert found.of_prompts(1, 16, 128.0) == pytest.approx(COST.of_prompts(1, 16, 128.0), rel=0.1)


def test_a_profile_without_prompts_says_too_little() -> None:
    stream = {"streams": 1, "context_tokens": 500, "prompt_tokens": 0, "prompt_pairs": 0.0}
    with pytest.raises(ConfigError, match="no step has prompt_tokens"):
        fitted_cores(steps_of(step(1, 0.0, stream, 1.0, 1)[0]), COST)


def mixed(number: int) -> Event:
    return {"streams": 2, "context_tokens": 500 + number, "prompt_tokens": 64 + number, "prompt_pairs": 4096.0}


ALONE = {"streams": 1, "context_tokens": 500, "prompt_tokens": 0, "prompt_pairs": 0.0}


def test_a_profile_without_steps_of_streams_alone_says_too_little() -> None:
    events, at_us = [], 0.0
    for number in range(30):
        ran, at_us = step(1, at_us + BETWEEN_US, mixed(number), 1.0, 1)
        events += ran
    with pytest.raises(ConfigError, match="no step has streams alone"):
        fitted_cores(steps_of(events), COST)


def test_a_profile_without_steps_right_after_each_other_says_too_little() -> None:
    events = [event for pid, facts in ((1, mixed(0)), (2, ALONE)) for event in step(pid, 0.0, facts, 1.0, 1)[0]]
    with pytest.raises(ConfigError, match="no worker ran one step right after another"):
        fitted_cores(steps_of(events), COST)


@pytest.mark.parametrize("name", ["steps.json", "steps.json.gz"])
def test_a_trace_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    text = json.dumps({"traceEvents": list(host())}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert [len(steps) for steps in read_steps(tmp_path / name)] == [len(steps) for steps in steps_of(host())]


STEP = {"ph": "X", "name": "step", "pid": 1, "tid": 1, "ts": 0.0, "dur": 1.0}


@pytest.mark.parametrize(
    "events", [[{"name": "step"}], [STEP], [STEP | {"args": None}], [STEP | {"args": {"streams": 1}}], ["step"], 7]
)
def test_a_trace_of_another_program_is_refused(tmp_path: Path, events: Any) -> None:
    (tmp_path / "steps.json").write_text(json.dumps({"traceEvents": events}))
    with pytest.raises(ConfigError, match="--steps"):
        read_steps(tmp_path / "steps.json")


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "steps.json").write_text(text)
    with pytest.raises(ConfigError, match="--steps"):
        read_steps(tmp_path / "steps.json")


@pytest.mark.parametrize("damage", [lambda packed: packed[:-20], lambda packed: packed[:10] + b"?" * 20 + packed[30:]])
def test_a_packed_trace_that_is_damaged_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    packed = gzip.compress(json.dumps({"traceEvents": list(host())}).encode())
    (tmp_path / "steps.json.gz").write_bytes(damage(packed))
    with pytest.raises(ConfigError, match="--steps"):
        read_steps(tmp_path / "steps.json.gz")
