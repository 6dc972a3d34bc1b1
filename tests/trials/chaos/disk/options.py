"""The flags of `disk`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from tests.trials.chaos import page_section
from tests.trials.chaos.program import ReportOptions, add_report_arguments

MODEL = "paced:step_ms=4,prefill_tokens_per_s=2000,max_model_len=2048,page_bytes=128"
"""8 ms to compute a block: many times what a disk takes for its page. Every bit of a page counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    only: tuple[str, ...]
    model: str
    dtype: str
    report: ReportOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL, help="as `serve --model` (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", help="as `serve --dtype` (default: %(default)s)")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help='of the faults\' names: "SIG*"')
    add_report_arguments(parser)


def options_from(args: argparse.Namespace) -> DiskOptions:
    report = ReportOptions(args.json, args.write, page_section.DISK)
    return DiskOptions(only=tuple(args.only), model=args.model, dtype=args.dtype, report=report)
