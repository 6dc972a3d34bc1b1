"""`python -m tests.trials.chaos.faults`: see `options` for its flags."""

from __future__ import annotations

import sys

from tests.trials.chaos.faults.options import add_arguments, options_from
from tests.trials.chaos.faults.session import run_session
from tests.trials.chaos.program import run_program

DESCRIPTION = "A cluster is broken in every way at every step of a request's life, and no client may notice."
EPILOG = """The exit status is 1 if anything was lost, left behind or not reached. Ctrl-C stops the cluster, too.

examples:
  python -m tests.trials.chaos.faults --write docs/faults.md
  python -m tests.trials.chaos.faults --only "decode/pull.*/kill" --transports tcp --seed 7
  python -m tests.trials.chaos.faults --model smollm2-135m --dtype float32 --sample 10 --write docs/faults.md
"""

if __name__ == "__main__":
    sys.exit(run_program("faults", DESCRIPTION, EPILOG, add_arguments, lambda args: run_session(options_from(args))))
