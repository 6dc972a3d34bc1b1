"""The flags of `tests.trials.bench grammars`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.flags.checks import file_can_be_made
from tests.trials.bench.options import json_file
from twostroke.config import DEFAULT_MODEL, flags
from twostroke.config.settings import Settings, group, setting


class GrammarOptions(Settings):
    model: str = setting(DEFAULT_MODEL, help="whose steps are timed")
    dtype: str = setting("bfloat16", choices=("bfloat16", "float16", "float32"), help="its numbers")
    threads: int = setting(1, least=1, help="of the engine")
    streams: int = setting(16, least=1, help="answers in a step")
    context: int = setting(128, least=16, help="tokens that each answer attends to")
    repeats: int = setting(100, least=1, help="steps of each kind, by turns")
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: GrammarOptions = group(GrammarOptions, "grammars")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> GrammarOptions:
    return flags.read(_Flags, args).options
