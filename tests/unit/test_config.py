"""Configs travel as JSON; what is wrong with one is a ConfigError that says where."""

from __future__ import annotations

import json

import pytest

from twostroke.config import Role, ScheduleConfig, WorkerConfig
from twostroke.errors import ConfigError
from twostroke.json_values import from_json, to_json

CONFIG = WorkerConfig(
    role=Role.DECODE, worker_id="decode-0", transports=("shm", "tcp"), schedule=ScheduleConfig(step_target_s=0.02)
)


def test_a_config_comes_back_as_it_was_written() -> None:
    assert from_json(WorkerConfig, to_json(CONFIG)) == CONFIG


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"role": "cook"}, "WorkerConfig.role must be one of"),
        ({"transports": "shm"}, "WorkerConfig.transports must be a list"),
        ({"transports": ["shm", 5]}, r"WorkerConfig.transports\[1\] must be str"),
        ({"threads": "two"}, "WorkerConfig.threads must be int"),
        ({"schedule": {"step_target_s": "soon"}}, "WorkerConfig.schedule.step_target_s must be float"),
        ({"schedule": {"step_target_s": float("inf")}}, "--step-target-ms must be positive and finite"),
        ({"cooks": 2}, "unknown keys"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        from_json(WorkerConfig, json.dumps(json.loads(to_json(CONFIG)) | changes))


@pytest.mark.parametrize("text", ["", "[]", "{", "5", "{}", '{"role": "decode"}'])
def test_what_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="WorkerConfig"):
        from_json(WorkerConfig, text)


def test_a_step_fits_its_device_and_every_sequence_unless_it_is_given() -> None:
    assert (ScheduleConfig().step_tokens(), ScheduleConfig().step_tokens(on_gpu=True)) == (128, 4096)
    assert ScheduleConfig(max_num_seqs=200).step_tokens() == 400
    assert ScheduleConfig(max_num_batched_tokens=96).step_tokens(on_gpu=True) == 96
