"""The flags of `tests.trials.bench pins`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.flags.checks import file_can_be_made
from tests.trials.bench.options import json_file
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting

SERVE = "--model smollm2-135m --max-model-len 1024 --kv-cache-memory 72M"
"""A pool of 204 pages, of which a request takes at most 64 and pins at most 51."""


class PinsOptions(Settings):
    rounds: int = setting(5, least=1, help="questions after each system prompt, each after a flood; medians count")
    words: int = setting(560, least=20, help="words of each system prompt, and of each prompt of a flood")
    flood: int = setting(14, least=1, help="prompts of one flood, all different")
    serve: str = setting(SERVE, unit="FLAGS", help="flags of `twostroke serve`, in one word")
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: PinsOptions = group(PinsOptions, "pins")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> PinsOptions:
    return flags.read(_Flags, args).options
