"""`python -m tests.trials.chaos.injection.process MODULE ARGUMENTS...`: a module of the product that can be broken on
purpose.

A launcher that is started so starts its routers so; Ray, which inherits the environment, calls `begin` in its workers.
"""

from __future__ import annotations

import os
import runpy
import sys

from tests.trials.chaos.injection.injector import from_environment
from tests.trials.chaos.injection.plan import ENVIRONMENT
from tests.trials.chaos.injection.product import inject

RAY_SETUP = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Ray calls the function that it names when it starts a worker process."""


def begin() -> None:
    """Lets faults happen in this process, if TWOSTROKE_FAULT is set."""
    injector = from_environment()
    if injector is not None:
        inject(injector)


def command_of(*module_and_arguments: str) -> list[str]:
    """What runs a module of the product: as it is, or so that it can be broken where TWOSTROKE_FAULT is set."""
    harness = (__name__,) if ENVIRONMENT in os.environ else ()
    return [sys.executable, "-m", *harness, *module_and_arguments]


if __name__ == "__main__":
    os.environ[RAY_SETUP] = "tests.trials.chaos.injection.process.begin"
    begin()
    module, *sys.argv[1:] = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
