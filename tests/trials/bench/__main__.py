"""`python -m tests.trials.bench NAME`: see `COMMANDS`."""

from __future__ import annotations

import sys

from cluster.cli import Program
from cluster.commands import Command

COMMANDS = {
    "kernels": Command(
        "tests.trials.bench.kernels",
        "attention, matrix products and whole steps on this machine's CPU, over what it can do at most",
    ),
    "forms": Command("tests.trials.bench.forms", "bytes and quality of each form of pages, with a real model and text"),
    "weights": Command(
        "tests.trials.bench.weights", "quality and speed of each format of quantised weights, beside bfloat16"
    ),
    "conversion": Command(
        "tests.trials.bench.conversion",
        "pulls between workers of two forms: the source converts, the puller, or by price",
    ),
    "adapters": Command(
        "tests.trials.bench.adapters",
        "tokens per second of a served load with an adapter in every row, and without any",
    ),
    "determinism": Command(
        "tests.trials.bench.determinism",
        "shares of streams that are the same wherever they are computed, and what --deterministic costs",
    ),
    "policies": Command(
        "tests.trials.bench.policies",
        "routing policies on real clusters in turns, under the same requests; the simulator beside them",
    ),
    "cores": Command(
        "tests.trials.bench.shared_cores",
        "first tokens of a real prefill and decode worker on two shared cores; the simulator beside them",
    ),
    "overload": Command(
        "tests.trials.bench.overload",
        "what a server does with up to three times what it can do: goodput, refusals, deadlines, memory",
    ),
    "sweep": Command(
        "tests.trials.bench.sweep",
        "simulated, prompt length x load x bandwidth: who should compute, and whether the router chooses as well",
    ),
    "grid": Command(
        "tests.trials.bench.grid",
        "simulated, trace x size of the fleet x load: our policy over the best of the others in every cell",
    ),
    "dynamo": Command(
        "tests.trials.bench.dynamo",
        "simulated, our port of Dynamo's policy and ours beside Dynamo's own replay, under the same steps",
    ),
    "index": Command(
        "tests.trials.bench.index",
        "the router's prefix index: lookups, learning and memory, beside another router's if it is at hand",
    ),
    "host": Command(
        "tests.trials.bench.host_cost",
        "processor time that router and decode worker spend on each token, beside the model",
    ),
    "open-prompts": Command(
        "tests.trials.bench.open_prompts",
        "processor time of each worker per long prompt, while many of them are open",
    ),
    "grammars": Command(
        "tests.trials.bench.grammars",
        "decode steps whose answers all have grammars, beside steps without any, with a real model",
    ),
    "speculation": Command(
        "tests.trials.bench.speculation",
        "time per output token with speculation and without, with a real model; answers are compared",
    ),
    "ranks": Command(
        "tests.trials.bench.ranks",
        "sums over the ranks of a worker in shared memory, beside copying their bytes twice",
    ),
    "rivals": Command(
        "tests.trials.bench.rivals",
        "time per output token beside vLLM's n-grams and llama.cpp's draft model, on the same prompts",
    ),
    "extremes": Command(
        "tests.trials.bench.extremes", "how late other streams come while extreme schemas are compiled and followed"
    ),
    "startup": Command(
        "tests.trials.bench.startup",
        "how long `serve` takes until it is ready, and what it takes while nobody asks",
    ),
    "tiers": Command(
        "tests.trials.bench.tiers",
        "chats that do not fit into the pages: first tokens with host memory or a disk below these, and without",
    ),
    "pins": Command(
        "tests.trials.bench.pins",
        "first tokens after a pinned system prompt and after one that was only used, over floods and a kill",
    ),
    "decisions": Command(
        "tests.trials.bench.decisions", "how long the router thinks about one request, in a large fleet"
    ),
    "console": Command(
        "tests.trials.bench.console", "what open pages of the console take from a router with 500 workers under load"
    ),
}
PROGRAM = Program("python -m tests.trials.bench", "Measure the product's parts.", COMMANDS)

if __name__ == "__main__":
    sys.exit(PROGRAM.main())
