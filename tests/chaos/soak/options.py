"""The flags of `soak`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from cluster.flags.checks import file_can_be_made, positive
from tests.chaos import page_section
from tests.chaos.faults.options import MODEL, FaultsOptions

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """ "90s", "10m" or "1.5h"; a bare number is seconds."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if matched is None:
        raise argparse.ArgumentTypeError(f"not a time: {text!r}; write for example 90s, 10m, 1h")
    return float(matched[1]) * _UNITS_S[matched[2] or "s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    duration_s: float
    quiet_s: float
    """Seconds of load without a fault, between two, on the average."""
    cluster: FaultsOptions
    json_path: str | None
    write: Path | None

    def __post_init__(self) -> None:
        positive("--for", self.duration_s)
        positive("--quiet", self.quiet_s)
        file_can_be_made("--json", self.json_path)
        page_section.check(self.write, page_section.SOAK)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--for", dest="duration", type=seconds, default=3600.0, metavar="TIME", help="(default: 1h)")
    parser.add_argument("--seed", type=int, default=1, help="of load, faults and pauses (default: %(default)s)")
    parser.add_argument(
        "--quiet",
        type=seconds,
        default=5.0,
        metavar="TIME",
        help="of load without a fault between two, on the average (default: %(default)s s)",
    )
    parser.add_argument("--transports", default="tcp", metavar="NAMES", help="as `serve` (default: %(default)s)")
    parser.add_argument("--model", default=MODEL, help="as `serve --model` (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="as `serve --dtype` (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help='"-": to standard output')
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the report into it, as docs/faults.md")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep the logs of clusters in which something was wrong"
    )


def options_from(args: argparse.Namespace) -> SoakOptions:
    return SoakOptions(
        duration_s=args.duration,
        quiet_s=args.quiet,
        cluster=FaultsOptions(
            seed=args.seed,
            only=(),
            quick=False,
            sample=None,
            transports=(args.transports,),
            model=args.model,
            dtype=args.dtype,
            patience_s=3.0,
            json_path=None,
            write=None,
            breaks=None,
            logs=args.logs,
        ),
        json_path=args.json,
        write=args.write,
    )
