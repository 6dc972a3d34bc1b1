"""`python -m tests.trials.clients [--write FILE] [NAME ...]`: stock clients against a served model, and what each
saw."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.processes import running_cluster
from tests.trials.clients.asks import Served
from tests.trials.clients.benchmarks import BENCHMARKS
from tests.trials.clients.stock import (
    ANTHROPIC,
    LANGCHAIN,
    LITELLM,
    NODE,
    OPENAI,
    PYDANTIC_AI,
    TRITONCLIENT,
    ClientOfAKind,
)
from tests.trials.clients.structured import STRUCTURED
from twostroke.config import DEFAULT_MODEL, ModelConfig
from twostroke.config.output import OutputConfig
from twostroke.models.catalog.fetch import fetch

CLIENTS: tuple[ClientOfAKind, ...] = (
    OPENAI,
    LITELLM,
    NODE,
    LANGCHAIN,
    PYDANTIC_AI,
    ANTHROPIC,
    TRITONCLIENT,
    *STRUCTURED,
    *BENCHMARKS,
)

HERMES = OutputConfig(tool_call_parser="hermes")
"""The model's chat template knows no tools: its calls are what the grammar makes of it."""

PREFACE = """# Clients

Clients of the field, each unmodified in an environment of its own, against two workers and a router with smollm2-135m
in float32 on a CPU. Right means: the texts are those that the server gives to a plain POST, no request fails, and the
counts of prompt and answer tokens are those of the tokenizer and of the answer's ids. `make clients` installs them,
runs them and writes this page; tritonclient (over gRPC and HTTP) is in the gate, too.
`node` is the openai package for it.

| Client | Asked | Result |
|---|---|---|
"""


async def check(clients: Sequence[ClientOfAKind]) -> list[str]:
    """A row for each client."""
    model_dir = fetch(DEFAULT_MODEL, "float32", lambda stage, part: None)
    model = ModelConfig(dtype="float32")
    async with running_cluster(prefill=1, decode=1, model=model, model_dir=model_dir, output=HERMES) as cluster:
        served = Served(cluster.http, "smollm2-135m", model_dir, cluster.grpc)
        expected = await asyncio.to_thread(served.expected)
        rows = []
        for client in clients:
            began_s = time.monotonic()
            problems = await asyncio.to_thread(client.problems, served, expected)
            result = "; ".join(problems).replace("\n", " ").replace("|", "\\|") or "right"
            rows.append(f"| {client.name} {client.version()} | {client.asked} | {result} |")
            print(rows[-1], f"{time.monotonic() - began_s:.0f} s", flush=True)
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trials.clients", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", help="what names of clients begin with; default: all")
    parser.add_argument("--write", type=Path, help="where the table goes, once all clients are right")
    arguments = parser.parse_args()
    clients = [client for client in CLIENTS if client.name.startswith(tuple(arguments.names or ("",)))]
    rows = asyncio.run(check(clients))
    is_right = all(row.endswith(" right |") for row in rows)
    if is_right and arguments.write is not None and not arguments.names:
        arguments.write.write_text(PREFACE + "\n".join(rows) + "\n")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
