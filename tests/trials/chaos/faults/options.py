"""The flags of `faults`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cluster.flags.checks import positive
from tests.trials.chaos import page_section
from tests.trials.chaos.injection.plan import Guard
from tests.trials.chaos.program import (
    ClusterOptions,
    ReportOptions,
    add_cluster_arguments,
    add_report_arguments,
    cluster_options,
)

SECTIONS = (
    page_section.MATRIX,
    page_section.SAMPLE,
    page_section.TIERS,
    page_section.PINS,
    page_section.RANKS,
    page_section.DRAFTS,
)
TRANSPORTS = ("tcp", "")
"""Transports of clusters, one after the other. Empty means the default, which on one host is shared memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultsOptions:
    only: tuple[str, ...]
    quick: bool
    sample: int | None
    """So many faults are tried, drawn from all; None: all."""
    short: bool
    """Freezes and cuts last as long as in the quick part."""
    transports: tuple[str, ...]
    cluster: ClusterOptions
    report: ReportOptions

    def __post_init__(self) -> None:
        if self.sample is not None:
            positive("--sample", self.sample)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cluster_arguments(parser, seed="of order and draws")
    add_report_arguments(parser)
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help='of "process/point/kind": "decode/pull.*/kill"'
    )
    parser.add_argument(
        "--into",
        choices=SECTIONS,
        help="the section of --write's page; a part of the matrix has its own (default: matrix; real models: sample)",
    )
    parser.add_argument("--quick", action="store_true", help="one fault of each sort in each kind of process")
    parser.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="so many, drawn so that no kind comes twice to a point before all others",
    )
    parser.add_argument("--short", action="store_true", help="freezes and cuts last for 2.7 s, as with --quick")
    parser.add_argument(
        "--transports",
        action="append",
        metavar="NAMES",
        help='as `serve --transports`; "default": without it (default: most of the faults over tcp, a part without it)',
    )
    parser.add_argument(
        "--break", dest="breaks", choices=[guard.value for guard in Guard], help="switch that off: it has to be noticed"
    )


def options_from(args: argparse.Namespace) -> FaultsOptions:
    asked = args.transports or list(TRANSPORTS)
    cluster = cluster_options(args, args.breaks)
    section = args.into or (page_section.MATRIX if cluster.is_paced else page_section.SAMPLE)
    return FaultsOptions(
        only=tuple(args.only),
        quick=args.quick,
        sample=args.sample,
        short=args.short or args.quick,
        transports=tuple("" if transports == "default" else transports for transports in asked),
        cluster=cluster,
        report=ReportOptions(args.json, args.write, section),
    )
