"""`python -m tests.trials.bench tiers`: chats that do not fit into the pages, with and without tiers below these.

    options  the flags, checked once
    replay   the same requests in the simulator, with a fleet that was fitted to the real one
    measure  one real cluster per variant: every chat's turns in rounds, then prompts that nobody repeats
    in_turns prompts that nobody repeats, on two clusters side by side

Nothing that serves is imported until `run` is called.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.tiers import options

EPILOG = """examples:
  python -m tests.trials.bench tiers
  python -m tests.trials.bench tiers --chats 48 --turns 6 --json tiers.json
  python -m tests.trials.bench tiers --variants none,disk --unique 0
  python -m tests.trials.bench tiers --variants none,disk --unique 120 --in-turns
  python -m tests.trials.bench tiers --simulate --chats 48 --turns 6 --unique 0 \\
    --model paced:step_ms=15,prefill_tokens_per_s=2000,page_bytes=368640,vocab=40000,max_model_len=4096
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises ServeError for bad flags."""
    checked = options.options_from(args)
    if checked.in_turns:
        from tests.trials.bench.tiers.in_turns import run_in_turns

        return run_in_turns(checked)
    from tests.trials.bench.tiers.measure import run_session

    return run_session(checked)
