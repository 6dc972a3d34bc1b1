"""The flags of `tests.trials.bench decisions`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.flags.checks import file_can_be_made
from router.routing.policies import POLICIES
from tests.trials.bench.index.content import DEEP_BLOCKS
from tests.trials.bench.options import json_file
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting


class DecisionOptions(Settings):
    policy: str = setting("kv", choices=tuple(sorted(POLICIES)), help="the policy that decides")
    workers: int = setting(64, least=4, help="workers, half of each role")
    blocks: int = setting(1_000_000, least=10 * DEEP_BLOCKS, help="blocks in the index")
    decisions: int = setting(2000, least=2, help="decisions of each kind")
    seed: int = setting(0, help="seed of everything drawn")
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: DecisionOptions = group(DecisionOptions, "decisions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> DecisionOptions:
    return flags.read(_Flags, args).options
