"""The flags of `tests.trials.bench determinism`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.flags.checks import file_can_be_made
from tests.trials.bench.options import json_file
from twostroke.config import DEFAULT_MODEL, flags
from twostroke.config.settings import Settings, group, setting


class DeterminismOptions(Settings):
    model: str = setting(DEFAULT_MODEL, help="the model whose streams are compared")
    engines: str = setting(
        "bfloat16,bfloat16:torch,float32,float32:torch",
        unit="DTYPE[:KERNELS],...",
        help="kernels as in TWOSTROKE_CPU_KERNELS; without them what a worker would choose",
    )
    streams: int = setting(16, least=1, help="streams at once")
    tokens: int = setting(32, least=1, help="tokens of each answer")
    repeats: int = setting(7, least=1, help="repeats of each timing")
    seed: int = setting(0, help="seed of prompts, chunks and company")
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)


class _Flags(Settings):
    options: DeterminismOptions = group(DeterminismOptions, "determinism")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> DeterminismOptions:
    return flags.read(_Flags, args).options
