"""The flags of `tests.trials.bench startup`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.flags.checks import file_can_be_made
from tests.trials.bench.options import json_file
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting


class StartupOptions(Settings):
    rounds: int = setting(5, least=1, help="starts, of which the medians count")
    first: bool = setting(False, help="each start is a machine's first one: kernels are compiled, weights packed")
    pause: float = setting(5.0, least=0, unit="S", help="time between readiness and the measurement")
    idle: float = setting(20.0, above=0, unit="S", help="time of the measurement of processor time")
    serve: str = setting("", unit="FLAGS", help="further flags of `twostroke serve`, in one word")
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: StartupOptions = group(StartupOptions, "startup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> StartupOptions:
    return flags.read(_Flags, args).options
