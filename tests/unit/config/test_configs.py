"""Configs travel as JSON; what is wrong with one is a ConfigError that says where."""

from __future__ import annotations

import json

import pytest

from twostroke.base.errors import ConfigError
from twostroke.config import Role, RuntimeConfig, ScheduleConfig, WorkerConfig

CONFIG = WorkerConfig(
    role=Role.DECODE,
    worker_id="decode-0",
    runtime=RuntimeConfig(transports=("shm", "tcp")),
    schedule=ScheduleConfig(step_target_ms=20.0),
)


DRAFTED = {"speculate": "model", "draft_model": "small"}


def test_a_config_comes_back_as_it_was_written() -> None:
    assert WorkerConfig.from_json(CONFIG.to_json()) == CONFIG


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"role": "cook"}, "WorkerConfig.role must be one of 'prefill', 'decode' or 'router', got 'cook'"),
        ({"runtime": {"transports": "shm"}}, "--transports must be a list, got 'shm'"),
        ({"runtime": {"transports": ["shm", 5]}}, r"--transports\[1\] must be text, got 5"),
        ({"runtime": {"threads": "two"}}, "--threads must be a whole number, got 'two'"),
        ({"runtime": {"threads": True}}, "--threads must be a whole number, got True"),
        ({"runtime": 5}, "RuntimeConfig must be an object, got 5"),
        ({"schedule": {"step_target_ms": "soon"}}, "--step-target-ms must be a number, got 'soon'"),
        ({"schedule": {"step_target_ms": float("inf")}}, "--step-target-ms must be positive and finite"),
        ({"cache": {"device_share": 1.5}}, "CacheConfig.device_share must be more than 0 and at most 1, got 1.5"),
        ({"cache": {"decode_kv_format": "int7"}}, "--decode-kv-format must be bfloat16, float16,"),
        (
            {"cache": {"decode_kv_format": "int8"}, "model": {"deterministic": True}},
            "so --deterministic cannot be kept",
        ),
        ({"cache": {"prefill_kv_format": "int8"}, "model": {"model": "paced:"}}, "paced model has no numbers to conv"),
        ({"model": {"tp": 0}}, "--tp must be"),
        ({"model": {"decode_tp": 10_000}}, "--decode-tp must be"),
        ({"model": {"model": "paced:", "tp": 2}}, "--tp 2: a paced model computes nothing"),
        (
            {"model": {"prefill_tp": 2}, "flexible": True},
            "have 2 ranks and decode workers 1 rank: no worker can switch",
        ),
        (
            {"model": {"decode_tp": 2, "deterministic": True}},
            "prefill workers have 1 rank and decode workers 2 ranks: .* give both the same --tp, or",
        ),
        (
            {"cache": {"decode_kv_format": "int8"}, "model": {"prefill_tp": 2, "deterministic": True}},
            "2 ranks and decode workers 1 rank, prefill workers' pages hold bfloat16 and .* the same --tp and format,",
        ),
        (
            {"cache": {"prefill_kv_format": "int8"}, "flexible": True},
            "hold int8 and decode workers' bfloat16: no worker",
        ),
        ({"cache": {"kv_exact_layers": 2}}, "--kv-exact-layers 2 is for --kv-format int4, and pages hold bfloat16"),
        (
            {"cache": {"kv_exact_layers": 2, "prefill_kv_format": "int4"}, "flexible": True},
            r"hold int4\+2xbfloat16 and decode workers' bfloat16: no worker",
        ),
        ({"schedule": {"speculate": "model"}}, "--speculate model needs --draft-model"),
        ({"schedule": {"speculate": "eagle3"}}, "^--speculate eagle3: EAGLE-3 heads are not served$"),
        ({"schedule": {"speculate": "mtp", "draft_model": "small"}}, "^--speculate mtp: MTP heads are not served$"),
        ({"schedule": {"draft_cache_bytes": 1 << 20}}, "--draft-cache-memory would be ignored"),
        ({"schedule": {"speculate": "medusa"}}, "--speculate must be auto, off, grammar, lookup, suff"),
        (
            {"schedule": {"draft_model": "small", "speculate": "off"}},
            "--draft-model small would propose nothing with --speculate off",
        ),
        (
            {"schedule": DRAFTED, "model": {"model": "paced:"}},
            "--draft-model small: a paced model computes nothing",
        ),
        ({"schedule": DRAFTED, "model": {"device": "cuda:1"}}, "computed on CPUs only, and --device is cuda:1"),
        ({"model": {"weights": "int8", "dtype": "float32"}}, "--weights int8 needs --dtype bfloat16, got float32"),
        ({"model": {"weights": "int8", "dtype": "float16"}}, "--weights int8 needs --dtype bfloat16, got float16"),
        ({"model": {"model": ""}}, "--model must be the name of a model, got ''"),
        ({"schedule": {"draft_model": ""}}, "--draft-model must be the name of a model, got ''"),
        ({"schedule": DRAFTED, "model": {"model": "small"}}, "--draft-model small is the model itself"),
        ({"cooks": 2}, "WorkerConfig has no setting cooks; known are role, worker_id,"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        WorkerConfig.from_json(json.dumps(json.loads(CONFIG.to_json()) | changes))


@pytest.mark.parametrize("text", ["", "[]", "{", "5", "{}", '{"role": "decode"}'])
def test_what_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="WorkerConfig"):
        WorkerConfig.from_json(text)


def test_a_step_fits_its_device_and_every_sequence_unless_it_is_given() -> None:
    assert (ScheduleConfig().step_tokens(), ScheduleConfig().step_tokens(on_gpu=True)) == (128, 4096)
    assert ScheduleConfig(max_num_seqs=200).step_tokens() == 400
    assert ScheduleConfig(max_num_batched_tokens=96).step_tokens(on_gpu=True) == 96
