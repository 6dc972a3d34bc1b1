"""`python -m tests.trials.chaos.hosts`: flags, and the exit status."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cluster.flags.checks import positive
from tests.trials.chaos import page_section
from tests.trials.chaos.hosts.session import HostsOptions, run_session
from tests.trials.chaos.program import run_program
from twostroke.base.errors import ConfigError

DESCRIPTION = "Hosts and cables of a cluster break one after the other, and no client may notice."
EPILOG = "The exit status is 1 on any problem of the cluster's, 2 where it could not be tried."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="three hosts, and one cable pulled")
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="everything so often (default: %(default)s)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help='of "role: what happens": "decode: cable*"'
    )
    parser.add_argument("--seed", type=int, default=1, help="of what is asked (default: %(default)s)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into it, as docs/multi-host.md")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of all hosts")


def session(args: argparse.Namespace) -> int:
    options = HostsOptions(
        quick=args.quick, runs=args.runs, only=tuple(args.only), seed=args.seed, write=args.write, logs=args.logs
    )
    positive("--runs", options.runs)
    if not options.faults:
        raise ConfigError(f"--only {' '.join(options.only)}: nothing is called so")
    page_section.check(options.write, page_section.HOSTS)
    return run_session(options)


if __name__ == "__main__":
    sys.exit(run_program("hosts", DESCRIPTION, EPILOG, add_arguments, session))
