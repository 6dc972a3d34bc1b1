"""Flags are checked before anything is sent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from twostroke.base.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--url", "127.0.0.1:8000"], "url"),
        (["--grpc", "localhost"], "grpc"),
        (["--grpc", "localhost:http"], "grpc"),
        (["--grpc", "localhost:50051", "--no-stream"], "stream"),
        (["--num-requests", "0"], "num_requests"),
        (["--prompt-tokens", "-1"], "prompt_tokens"),
        (["--output-tokens", "0"], "output_tokens"),
        (["--prompt-spread", "1"], "prompt_spread"),
        (["--shared-prefix-tokens", "256"], "shared_prefix_tokens"),
        (["--shared-prefix-tokens", "200", "--prompt-spread", "0.5"], "shared_prefix_tokens"),
        (["--prefix-groups", "0"], "prefix_groups"),
        (["--rate", "0"], "rate"),
        (["--rate", "nan"], "rate"),
        (["--rate", "1", "--concurrency", "2"], "rate"),
        (["--concurrency", "-2"], "concurrency"),
        (["--concurrency", "0"], "concurrency"),
        (["--warmup", "-1"], "warmup"),
        (["--timeout", "0"], "timeout"),
        (["--seed", "-1"], "seed"),
        (["--vocab-size", "3"], "vocab_size"),
        (["--trace-scale", "0"], "trace_scale"),
        (["--trace-length-scale", "inf"], "trace_length_scale"),
        (["--trace-limit", "0"], "trace_limit"),
        (["--temperature", "-1"], "temperature"),
        (["--json", "/no/such/directory/report.json"], "json"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(options: Any, flags: list[str], field: str) -> None:
    with pytest.raises(ConfigError, match=f"--(no-)?{field.replace('_', '-')}") as caught:
        options(*flags)
    assert str(caught.value.field).removeprefix("--").replace("-", "_") == field


def test_without_a_pace_one_request_at_a_time_is_sent(options: Any) -> None:
    assert options().pace.concurrency == 1
    assert options("--rate", "3").pace.concurrency is None
    assert options("--trace", "t.jsonl").pace.concurrency is None


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_a_url_works_with_and_without_its_version(options: Any, url: str) -> None:
    assert options("--url", url).target.name == "http://host:1/v1/completions"
    assert options("--url", url, "--chat").target.name == "http://host:1/v1/chat/completions"


def test_the_key_comes_from_the_flag_or_the_usual_variable(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-variable")
    assert options().target.api_key == "from-variable"
    assert options("--api-key", "from-flag").target.api_key == "from-flag"


def test_importing_the_command_loads_nothing_heavy() -> None:
    program = "import sys; before = set(sys.modules); import tools.bench; print(*(set(sys.modules) - before))"
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"aiohttp", "grpc", "numpy", "ray", "rich", "torch"}
