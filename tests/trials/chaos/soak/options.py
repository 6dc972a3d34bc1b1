"""The flags of `soak`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cluster.flags.checks import positive
from tests.trials.chaos import page_section
from tests.trials.chaos.program import (
    ClusterOptions,
    ReportOptions,
    add_cluster_arguments,
    add_report_arguments,
    cluster_options,
    seconds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    duration_s: float
    quiet_s: float
    """Seconds of load without a fault, between two, on the average."""
    transports: str
    cluster: ClusterOptions
    report: ReportOptions

    def __post_init__(self) -> None:
        positive("--for", self.duration_s)
        positive("--quiet", self.quiet_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--for", dest="duration", type=seconds, default=3600.0, metavar="TIME", help="(default: 1h)")
    add_cluster_arguments(parser, seed="of load, faults and pauses")
    add_report_arguments(parser)
    parser.add_argument(
        "--quiet",
        type=seconds,
        default=5.0,
        metavar="TIME",
        help="of load without a fault between two, on the average (default: %(default)s s)",
    )
    parser.add_argument("--transports", default="tcp", metavar="NAMES", help="as `serve` (default: %(default)s)")


def options_from(args: argparse.Namespace) -> SoakOptions:
    return SoakOptions(
        duration_s=args.duration,
        quiet_s=args.quiet,
        transports=args.transports,
        cluster=cluster_options(args),
        report=ReportOptions(args.json, args.write, page_section.SOAK),
    )
