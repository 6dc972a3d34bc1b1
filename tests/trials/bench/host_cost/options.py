"""The flags of `tests.trials.bench host`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.flags.checks import file_can_be_made
from tests.trials.bench.options import json_file
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.schedule import SPECULATE_AUTO
from twostroke.config.settings import Settings, group, setting


class HostCostOptions(Settings):
    streams: str = setting("16,64,200,1000", unit="N,N,...", help="open streams, in turns")
    protocol: str = setting("http", choices=("http", "grpc"), help="how clients read their streams")
    step_ms: float = setting(50.0, above=0, help="time of a step, in which every stream gets one token")
    seconds: float = setting(10.0, above=0, help="time of each measurement")
    rounds: int = setting(1, least=1, help="measurements of each number of streams, of which the median counts")
    speculate: str = setting(SPECULATE_AUTO, help="as --speculate of serve; off: nothing is proposed for any stream")
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)
        if any(number < 1 for number in self.numbers):
            raise ConfigError(f"--streams must be 1 or more, got {self.streams!r}", field="--streams")

    @property
    def numbers(self) -> tuple[int, ...]:
        try:
            return tuple(int(number) for number in self.streams.split(","))
        except ValueError as error:
            raise ConfigError(
                f"--streams must be whole numbers, as in 16,200, got {self.streams!r}", field="--streams"
            ) from error


class _Flags(Settings):
    options: HostCostOptions = group(HostCostOptions, "host")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> HostCostOptions:
    return flags.read(_Flags, args).options
