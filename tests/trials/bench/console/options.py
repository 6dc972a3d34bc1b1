"""The flags of `tests.trials.bench console`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.flags.checks import file_can_be_made
from tests.trials.bench.options import json_file
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting


class ConsoleOptions(Settings):
    workers: int = setting(500, least=2, help="workers, half of each role")
    rate: float = setting(10_000.0, above=0, help="requests per minute")
    pages: int = setting(3, least=1, help="open pages, by turns at the fleet, the slowest requests and the latest ones")
    rounds: int = setting(8, least=1, help="rounds with pages, and as many without, in turns")
    seconds: float = setting(10.0, above=0, help="time of each round")
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: ConsoleOptions = group(ConsoleOptions, "console")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> ConsoleOptions:
    return flags.read(_Flags, args).options
