"""The flags of `tests.trials.bench open-prompts`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.flags.checks import file_can_be_made
from tests.trials.bench.options import json_file
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting


class OpenPromptsOptions(Settings):
    open: str = setting("1,16,64,256", unit="N,N,...", help="prompts that are open at once, in turns")
    tokens: int = setting(55_000, least=1, help="tokens of each prompt, all of them new")
    prompts: int = setting(24, least=1, help="prompts of each measurement; at least twice those that are open")
    step_tokens: int = setting(512, least=1, help="most tokens in one step of a worker")
    tokens_per_s: float = setting(1e6, above=0, help="tokens of prompts that the model computes in a second")
    local_prefill: bool = setting(
        False, help="the decode worker computes prompts that would wait, and so its part of their cost"
    )
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)
        if any(number < 1 for number in self.numbers):
            raise ConfigError(f"--open must be 1 or more, got {self.open!r}", field="--open")

    @property
    def numbers(self) -> tuple[int, ...]:
        try:
            return tuple(int(number) for number in self.open.split(","))
        except ValueError as error:
            raise ConfigError(f"--open must be whole numbers, as in 1,16, got {self.open!r}", field="--open") from error


class _Flags(Settings):
    options: OpenPromptsOptions = group(OpenPromptsOptions, "open prompts")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> OpenPromptsOptions:
    return flags.read(_Flags, args).options
