"""Sixteen adapters over 2+2 workers that really compute, changed every second: `python -m
tests.trials.chaos.adapters`."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from transformers.utils import logging as transformers_logging

from tests.trials.chaos.adapters.churn import Churn
from tests.trials.chaos.adapters.fleet import BASE, KEPT, churned, fleet
from tests.trials.chaos.adapters.versions import small_model, stage_of
from tests.trials.chaos.program import seconds

NAMES, SERVED, VERSIONS = 20, 16, 40


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trials.chaos.adapters", description=__doc__)
    parser.add_argument("--for", dest="seconds", type=seconds, default=120.0, help="of load: 90s, 10m (default: 2m)")
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="churn-") as scratch:
        folder = Path(scratch)
        model = small_model(folder / "model")
        loras = folder / "loras"
        sizes = {"names": NAMES, "served": SERVED, "versions": VERSIONS}
        stage = stage_of(model, BASE, folders=loras, seed=wanted.seed, **sizes)
        flags = ("--model", str(model), "--dtype", "float32", "--kv-cache-memory", "2M")
        print(f"{SERVED} of {NAMES} names served, {VERSIONS} versions, {KEPT} on a worker", flush=True)
        with fleet(folder, loras, *flags) as (server, calls):
            churn = Churn(stage, calls, wanted.seed)
            seen, counted = asyncio.run(churned(server, churn, wanted.seconds, kills=True))
    facts = dataclasses.asdict(seen) | {f"workers_{key}": value for key, value in dataclasses.asdict(counted).items()}
    wrong = facts.pop("wrong")
    print(json.dumps(facts, indent=1))
    print("\n".join(["", *wrong[:20], f"{len(wrong)} wrong or failed answers"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
