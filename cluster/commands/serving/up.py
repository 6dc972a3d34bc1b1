"""`twostroke up -f cluster.yaml`: `serve` from one file; a fleet that runs already is adopted."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.file.cluster import read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--file", required=True, type=Path, metavar="FILE", help="the cluster, in YAML")
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="the Ray cluster to join (default: as the file's ray.address says)"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave workers and supervisor running when told to end; the next `up` with this file continues with them "
        "(default: they end, too)",
    )
    parser.add_argument(
        "--check", action="store_true", help="say whether the file, and files that it names, are well; then end"
    )


def run(args: argparse.Namespace) -> int:
    from cluster.launch.launcher import up  # imported here: help needs none of it
    from cluster.launch.start_checks import check

    file = read(args.file, args.address)
    config = file.config
    with file.source.naming_lines():
        if not args.check:
            return up(config, keeps=args.keep)
        check(config)
    print(f"{args.file}: {config.prefill} prefill, {config.decode} decode, {config.model.public_name}")
    return 0
