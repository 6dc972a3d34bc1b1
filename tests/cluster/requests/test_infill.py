"""Qwen2.5-Coder fills in the middle of functions: what it writes fits between both texts, and runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.cluster.served import ANY_PORT, starting

MODEL = "qwen2.5-coder-1.5b:gguf"

MIDDLES = {
    "a body": ("def add(a, b):\n    ", "\n\n\nassert add(2, 3) == 5\n"),
    "a case": (
        'def fibonacci(n):\n    """Returns the n-th Fibonacci number."""\n    if n < 2:\n',
        "    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\nassert fibonacci(10) == 55\n",
    ),
    "an expression": (
        "def is_even(number):\n    return",
        "\n\n\nassert is_even(4)\nassert not is_even(7)\n",
    ),
    "a loop": (
        "def average(numbers):\n    total = ",
        "\n    return total / len(numbers)\n\n\nassert average([1, 2, 6]) == 3\n",
    ),
}
"""Programs without a middle. Each checks itself."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    directory: Path = tmp_path_factory.mktemp("infill")
    flags = ["--model", MODEL, "--prefill", "0", "--decode", "1", "--max-model-len", "1024", *ANY_PORT]
    with starting(directory, *flags) as server:
        for stage in ("starting workers", "loading the model", "Ctrl-C ends it"):  # each has its own patience
            server.until_printed(stage)
        yield OpenAI(base_url=f"http://{server.address('HTTP')}/v1", api_key="none", timeout=300, max_retries=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIDDLES)
def test_a_middle_ends_by_itself_and_makes_a_program_that_runs(client: OpenAI, kind: str) -> None:
    prompt, suffix = MIDDLES[kind]
    whole = client.completions.create(model=MODEL, prompt=prompt, suffix=suffix, max_tokens=60, temperature=0)
    (choice,) = whole.choices
    assert choice.finish_reason == "stop"
    assert choice.text.strip()
    exec(prompt + choice.text + suffix, {})  # of a model at temperature 0, to these prompts
    chunks = client.completions.create(
        model=MODEL, prompt=prompt, suffix=suffix, max_tokens=60, temperature=0, stream=True
    )
    assert "".join(each.text for chunk in chunks for each in chunk.choices) == choice.text
