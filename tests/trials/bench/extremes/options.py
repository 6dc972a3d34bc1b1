"""The flags of `tests.trials.bench extremes`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.flags.checks import file_can_be_made
from tests.trials.bench.options import json_file
from twostroke.config import DEFAULT_MODEL, flags
from twostroke.config.settings import Settings, group, setting

PARTS = ("both", "router", "worker")


class ExtremeOptions(Settings):
    parts: str = setting("both", choices=PARTS, help="where it is measured")
    model: str = setting(DEFAULT_MODEL, help="whose vocabulary and steps these are")
    streams: int = setting(4, least=1, help="streams on the decode worker whose gaps are measured")
    beside: int = setting(2, least=1, help="answers beside them, which follow an extreme grammar or none")
    rounds: int = setting(3, least=1, help="rounds of each kind, by turns")
    seconds: float = setting(10.0, above=0, help="time of each round")
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: ExtremeOptions = group(ExtremeOptions, "extremes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> ExtremeOptions:
    return flags.read(_Flags, args).options
