"""`twostroke simulate`: policies and fleets in virtual time, by the router's and the workers' own objects."""

from __future__ import annotations

import argparse
from functools import partial

from cluster.flags.checks import Ignored, refuse_ignored
from tools.simulate import session
from tools.simulate.fit.fitting import run_fit
from tools.simulate.planning import plan, scale
from tools.subcommands import Subcommand, add_subcommands, run_subcommand
from twostroke.config import flags
from twostroke.config.leaves import leaves_of

EPILOG = """examples:
  twostroke simulate --trace conversation.jsonl --jitter 3 --policies all --utilisation 0.87 --html report.html
  twostroke simulate --workload conversation --find-rate 5 --jobs 2
  twostroke simulate plan --trace conversation.jsonl --slo-ttft 5 --slo-itl 0.05 --html plan.html
  twostroke simulate scale --workload conversation --surge 2 --max-prefill 6 --max-decode 6 --slo-ttft 5 --slo-itl 0.05
  twostroke simulate --fit requests.log --profile fleet.json
  twostroke simulate --trace requests.log --profile fleet.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    flags.add(parser, session.SimulateFlags)
    add_subcommands(parser, "other questions", COMMANDS, otherwise=_run)


def run(args: argparse.Namespace) -> int:
    """Raises ServeError for bad flags and files."""
    refuse_ignored(args, IGNORED)
    return run_subcommand(args)


def _run(args: argparse.Namespace) -> int:
    return run_fit(args) if args.fit is not None else session.run_session(args)


def _has(name: str, args: argparse.Namespace) -> bool:
    """Returns whether a flag is set. A subcommand may not know the flag at all."""
    return vars(args).get(name) not in (None, "")


COMMANDS = {
    "plan": Subcommand(
        "how many workers of each role a load needs, and where splitting them pays",
        partial(flags.add, kind=plan.PlanFlags),
        plan.run_session,
    ),
    "scale": Subcommand(
        "let the planner scale the fleet, and hold it against fleets that stay",
        partial(flags.add, kind=scale.ScaleFlags),
        scale.run_session,
    ),
}

_OF_A_FIT = ("--fit", "--steps", "--profile")
_NOT_FITTED = tuple(leaf.flag for leaf in leaves_of(session.SimulateFlags) if leaf.flag not in _OF_A_FIT)

IGNORED = (
    Ignored(_NOT_FITTED, lambda args: _has("fit", args), "--fit reads a log and writes --profile, and no more"),
    Ignored(("--rate",), lambda args: _has("trace", args), "a trace has times of its own"),
    Ignored(
        ("--rate-scale", "--utilisation"), lambda args: _has("find_rate", args), "--find-rate looks for the rate itself"
    ),
    Ignored(("--slo-itl",), lambda args: _has("find_rate", args), "--find-rate promises first tokens alone"),
    Ignored(
        ("--slo-ttft",),
        lambda args: _has("find_rate", args) and not args.admission,
        "--find-rate itself says within how many seconds",
    ),
    Ignored(("--of",), lambda args: not _has("utilisation", args), "it needs --utilisation"),
    Ignored(("--steps",), lambda args: not _has("fit", args), "it is a part of --fit"),
    Ignored(
        ("--host-page-s",),
        lambda args: not (_has("host_cache", args) or _has("profile", args)),
        "it needs --host-cache",
    ),
    Ignored(
        ("--disk-page-s",),
        lambda args: not (_has("disk_cache", args) or _has("profile", args)),
        "it needs --disk-cache",
    ),
    Ignored(("--precision",), lambda args: not _has("find_rate", args), "it needs --find-rate"),
)
