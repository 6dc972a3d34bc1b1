"""`python -m tests.trials.bench policies`: routing policies on real clusters, one after the other, under the same
requests.

    options     the flags, checked once
    readings    what a router says of its workers, and how busy this machine is
    trial       one policy on one fresh cluster under one trace: a Trial
    metrics     what trials are compared by: pure
    replay      the simulator on the same rows, with a fleet fitted to the trials' logs
    session     trials in turns, tables, JSON

Only argparse is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.policies import options

EPILOG = """Every trial has a cluster of its own, with empty caches, and gets the same requests at the same times. Paces
are those at which round-robin would keep prefill workers so busy, by the workers' costs and the hits of caches in
turns; what the trials measured is in the table. Ctrl-C stops the cluster that runs, too.

examples:
  python -m tests.trials.bench policies --trace conversation.jsonl --limit 600 --jitter 3 --length-scale 0.03125 \\
      --prefill 4 --decode 4 --kv-cache-memory 6M \\
      --model paced:prefill_tokens_per_s=2000,prefill_us_per_1k_pairs=200,step_ms=15,page_bytes=1024,max_model_len=65536
  python -m tests.trials.bench policies --workload conversation --limit 200 --length-scale 0.03125 \\
      --prefill 1 --decode 1 --utilisations 0.6 --rounds 1 --simulate
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0, or 1 if some trial answered nothing. Raises ServeError for bad flags and for a cluster that does not start."""
    checked = options.options_from(args)
    from tests.trials.bench.policies.session import run_session

    return run_session(checked)
