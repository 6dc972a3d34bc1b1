"""Which flags of `simulate` do nothing beside which others."""

from __future__ import annotations

import argparse

from cluster.flags.checks import Ignored


def _has(name: str, args: argparse.Namespace) -> bool:
    """A subcommand may not know the flag at all."""
    return vars(args).get(name) not in (None, "")


_NOT_FITTED = (
    *("--trace", "--workload", "--rate", "--limit", "--jitter", "--length-scale", "--seed"),
    *("--prefill", "--decode", "--pool-tokens", "--decode-pool-tokens", "--bandwidth", "--routers"),
    *("--event-delay", "--event-faults", "--noise"),
    *("--policies", "--rate-scale", "--utilisation", "--of", "--peer-pulls", "--slo-ttft", "--slo-itl"),
    *("--admission", "--find-rate", "--precision", "--json", "--html", "--jobs"),
)

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
    Ignored(("--precision",), lambda args: not _has("find_rate", args), "it needs --find-rate"),
)
