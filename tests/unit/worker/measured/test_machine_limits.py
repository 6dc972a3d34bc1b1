"""The machine's limits are measured once, between steps, and kept for whoever asks next."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.worker.rig import paced, worker_config
from twostroke.base import cache_key as keys
from twostroke.config import ModelConfig, Role, RuntimeConfig
from twostroke.engine.loop import EngineThread
from twostroke.worker.measured import machine_limits
from twostroke.worker.measured.machine_limits import kept_limits, limits_key, limits_of

CONFIG = worker_config(Role.DECODE, model=ModelConfig(dtype="float32"))


class Unused:
    def run(self, batch: object) -> None: ...

    def close(self) -> None: ...


class Counted:
    """Runs calls and counts them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Callable[[], None]) -> None:
        self.calls += 1
        call()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_limits, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(machine_limits, "SHAPES", ((8, 16, 32),))


def test_the_second_worker_of_a_machine_finds_what_the_first_has_measured(tmp_path: Path) -> None:
    first, second, third = Counted(), Counted(), Counted()
    measured = kept_limits(tmp_path, CONFIG, first)
    assert first.calls > 10
    assert measured.read_bytes_per_s > 0
    assert measured.operations_per_s > 0
    assert kept_limits(tmp_path, CONFIG, second) == measured
    assert second.calls == 0
    with_two = kept_limits(tmp_path, CONFIG.replace(runtime=RuntimeConfig(threads=2)), third)
    assert (with_two.threads, third.calls) == (2, first.calls)


def test_a_file_that_was_not_written_whole_is_measured_again(tmp_path: Path) -> None:
    again = Counted()
    (tmp_path / "limits.json").write_text('{"half')
    measured = kept_limits(tmp_path, CONFIG, again)
    assert again.calls > 10
    assert kept_limits(tmp_path, CONFIG, Counted()) == measured


async def test_trials_run_between_steps_and_only_where_a_cpu_computes() -> None:
    engine = EngineThread(Unused())  # type: ignore[arg-type]  # runs no step
    try:
        found = await limits_of(CONFIG, engine, is_on_cpu=True)
        assert found is not None
        assert found.threads == 1
        assert found.read_bytes_per_s > 0
        assert await limits_of(CONFIG, engine, is_on_cpu=False) is None
        assert await limits_of(worker_config(Role.DECODE, model=paced()), engine, is_on_cpu=True) is None
    finally:
        engine.close()


@pytest.mark.parametrize("input_name", ["machine", "processor", "features", "cores", "threads", "dtype", "code"])
def test_limits_are_measured_again_where_anything_differs_that_they_depend_on(
    input_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, config = limits_key(CONFIG), CONFIG
    if input_name == "machine":
        monkeypatch.setattr(platform, "node", lambda: "another")
    elif input_name in {"processor", "features"}:
        name = {"processor": "cpu_model", "features": "cpu_features"}[input_name]
        monkeypatch.setattr(machine_limits, name, lambda: "another")
    elif input_name == "cores":
        monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    elif input_name == "code":
        monkeypatch.setattr(keys, "_source_digest", lambda program, code: b"repaired")
    elif input_name == "threads":
        config = CONFIG.replace(runtime=RuntimeConfig(threads=CONFIG.runtime.threads + 1))
    else:
        config = CONFIG.replace(model=CONFIG.model.replace(dtype="float16"))
    assert limits_key(config) != before
