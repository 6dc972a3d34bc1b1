"""The flags of `tests.bench index`."""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import dataclass

from cluster.flags.checks import file_can_be_made
from tests.bench.index.content import DEEP_BLOCKS
from twostroke.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    workers: int
    blocks: int
    lookups: int
    seed: int
    dynamo_python: str | None
    json_path: str | None

    def __post_init__(self) -> None:
        if self.lookups < 2:
            raise ConfigError(f"--lookups must be at least 2, got {self.lookups}", field="lookups")
        file_can_be_made("--json", self.json_path)
        if self.workers < 3:
            raise ConfigError(f"--workers must be at least 3, got {self.workers}", field="workers")
        if self.blocks < 10 * DEEP_BLOCKS:
            raise ConfigError(f"--blocks must be at least {10 * DEEP_BLOCKS}, got {self.blocks}", field="blocks")
        if self.dynamo_python is not None and shutil.which(self.dynamo_python) is None:
            raise ConfigError(f"--dynamo-python {self.dynamo_python}: is no program", field="dynamo_python")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=64, metavar="N", help="that hold blocks (default %(default)s)")
    parser.add_argument(
        "--blocks", type=int, default=1_000_000, metavar="N", help="different ones (default %(default)s)"
    )
    parser.add_argument("--lookups", type=int, default=2000, metavar="N", help="of each kind (default %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of hashes and questions (default %(default)s)"
    )
    parser.add_argument(
        "--dynamo-python", metavar="PROGRAM", help="Python that has ai-dynamo-runtime: its radix tree is measured too"
    )
    parser.add_argument("--json", metavar="FILE", help='"-": to standard output')


def options_from(args: argparse.Namespace) -> IndexOptions:
    python = args.dynamo_python
    return IndexOptions(
        workers=args.workers,
        blocks=args.blocks,
        lookups=args.lookups,
        seed=args.seed,
        dynamo_python=None if python is None else os.path.abspath(python) if os.sep in python else python,
        json_path=args.json,
    )
