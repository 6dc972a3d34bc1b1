"""`twostroke profile`: records where routers and workers spend their time, as a trace for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from cluster.clients import admin_access
from cluster.profiles.chrome_trace import events_of
from cluster.profiles.collecting import ProcessProfile, collect
from cluster.profiles.table import lines_of
from twostroke.base.errors import ConfigError
from twostroke.rpc.profiles import MOST_SECONDS

FILE = "twostroke-profile.json.gz"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "seconds",
        nargs="?",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help=f"how long, at most {MOST_SECONDS:.0f} (default: 5)",
    )
    parser.add_argument(
        "--out",
        default=FILE,
        metavar="FILE",
        help=f"where the trace goes, compressed where it ends in .gz (default: {FILE}); ui.perfetto.dev and "
        "chrome://tracing open it",
    )
    admin_access.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    path = Path(args.out)
    profiles = collect(admin_access.access_from(args), args.seconds)
    with _opened(path) as file:
        write(profiles, file)
    for line in lines_of(profiles):
        print(line)
    print(f"{path}: open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


def write(profiles: Sequence[ProcessProfile], file: IO[str]) -> None:
    """Writes the trace as JSON, one event per line."""
    facts = {profile.name: facts_of(profile) for profile in profiles}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [')
    for number, event in enumerate(events_of(profiles)):
        file.write(f"{',' if number else ''}\n{json.dumps(event, allow_nan=False)}")
    file.write("\n]}\n")


def facts_of(profile: ProcessProfile) -> dict[str, object]:
    """Returns what a reader should know of the process's part of the trace."""
    about = profile.about
    return {
        "clock_error_ms": about.clock_error_ns / 1e6,
        "dropped": about.dropped,
        "failure": profile.failure,
        "limit_threads": about.limits.threads,
        "limit_read_gb_per_s": about.limits.read_bytes_per_s / 1e9,
        "limit_gflop_per_s": about.limits.operations_per_s / 1e9,
    }


def _opened(path: Path) -> IO[str]:
    try:
        return gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w")
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}", field="--out") from error
