"""`python -m tests.trials.chaos.disk`: see `options` for its flags."""

from __future__ import annotations

import sys

from tests.trials.chaos.disk.options import add_arguments, options_from
from tests.trials.chaos.disk.session import run_session
from tests.trials.chaos.program import run_program

DESCRIPTION = "The disk of a cluster's workers is broken under chats, and no answer may differ."
EPILOG = """The exit status is 1 if an answer differed, or a fault had no effect.

examples:
  python -m tests.trials.chaos.disk --write docs/faults.md
  python -m tests.trials.chaos.disk --only "SIGKILL*"
  python -m tests.trials.chaos.disk --model smollm2-135m --dtype float32
"""

if __name__ == "__main__":
    sys.exit(run_program("disk", DESCRIPTION, EPILOG, add_arguments, lambda args: run_session(options_from(args))))
