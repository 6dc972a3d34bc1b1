"""The flags of `tests.bench decisions`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cluster.flags.checks import file_can_be_made
from router.routing.policies import POLICIES, policy_named
from tests.bench.index.content import DEEP_BLOCKS
from twostroke.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionOptions:
    policy: str
    workers: int
    blocks: int
    decisions: int
    seed: int
    json_path: str | None

    def __post_init__(self) -> None:
        policy_named(self.policy)
        if self.decisions < 2:
            raise ConfigError(f"--decisions must be at least 2, got {self.decisions}", field="decisions")
        file_can_be_made("--json", self.json_path)
        if self.workers < 4:
            raise ConfigError(f"--workers must be at least 4, got {self.workers}", field="workers")
        if self.blocks < 10 * DEEP_BLOCKS:
            raise ConfigError(f"--blocks must be at least {10 * DEEP_BLOCKS}, got {self.blocks}", field="blocks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", choices=sorted(POLICIES), default="kv", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=64, metavar="N", help="half of each role (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=1_000_000, metavar="N", help="in the index (default %(default)s)")
    parser.add_argument("--decisions", type=int, default=2000, metavar="N", help="of each kind (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything drawn (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help='"-": to standard output')


def options_from(args: argparse.Namespace) -> DecisionOptions:
    return DecisionOptions(
        policy=args.policy,
        workers=args.workers,
        blocks=args.blocks,
        decisions=args.decisions,
        seed=args.seed,
        json_path=args.json,
    )
