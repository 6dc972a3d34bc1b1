"""`python -m tests.trials.chaos.soak`: see `options` for its flags."""

from __future__ import annotations

import sys

from tests.trials.chaos.program import run_program
from tests.trials.chaos.soak.options import add_arguments, options_from
from tests.trials.chaos.soak.session import run_session

DESCRIPTION = "Random faults under mixed load for as long as it is told; what is lost, left or grows is named."
EPILOG = """The exit status is 1 if any stream was wrong, anything was left behind, did not come back, or grew.

examples:
  python -m tests.trials.chaos.soak --for 1h --seed 3 --write docs/faults.md
  python -m tests.trials.chaos.soak --for 90s
"""

if __name__ == "__main__":
    sys.exit(run_program("soak", DESCRIPTION, EPILOG, add_arguments, lambda args: run_session(options_from(args))))
