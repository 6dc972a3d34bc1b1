"""The flags of `tests.trials.bench tiers`."""

from __future__ import annotations

import argparse
from typing import Any

from cluster.flags.checks import file_can_be_made
from tests.trials.bench.options import json_file
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.cache import KV_FORMATS
from twostroke.config.settings import Settings, group, setting

VARIANTS = ("none", "host", "disk", "both", "all-pages")


class TiersOptions(Settings):
    model: str | None = setting(None, help="the model", default_text="the default model")
    chats: int = setting(12, least=1, help="chats, each with one of four system prompts")
    turns: int = setting(4, least=2, help="turns of each chat")
    system: int = setting(256, least=1, help="tokens of a system prompt")
    said: int = setting(100, least=1, help="tokens that a user says in a turn")
    answer: int = setting(32, least=1, help="tokens of an answer")
    unique: int = setting(16, least=0, help="prompts afterwards that nobody repeats, two at once")
    in_turns: bool = setting(
        False, help="only the prompts that nobody repeats, on clusters of the first two variants, in turns"
    )
    share: int = setting(4, least=1, help="the chats take that many times the pages of each worker")
    at_once: int = setting(2, least=1, help="chats that are asked at once")
    simulate: bool = setting(
        False, help="play the same requests in the simulator, with a fleet fitted to each run's log"
    )
    profile_s: float | None = setting(
        None,
        above=0,
        unit="SECONDS",
        help="profile the workers' steps for that long from the second turn on, and simulate cores that they share",
        default_text="each simulated worker has a device of its own",
    )
    variants: tuple[str, ...] = setting(
        ("none", "host", "disk"), commas=True, unit="NAMES", help=f"of {', '.join(VARIANTS)}"
    )
    prefill_kv_format: str | None = setting(
        None, choices=KV_FORMATS, help="number format of the prefill worker's pages", default_text="the model's"
    )
    decode_kv_format: str | None = setting(
        None, choices=KV_FORMATS, help="the same of the decode worker's pages", default_text="the model's"
    )
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)
        if self.profile_s is not None and not self.simulate:
            raise ConfigError("--profile changes nothing without --simulate", field="profile_s")
        if self.in_turns and (len(self.variants) < 2 or self.unique < 2):
            raise ConfigError("--in-turns needs two variants, and --unique of at least 2", field="in_turns")
        unknown = [name for name in self.variants if name not in VARIANTS]
        if unknown or not self.variants:
            raise ConfigError(
                f"--variants must be of {', '.join(VARIANTS)}, got {','.join(unknown)!r}", field="variants"
            )


class _Flags(Settings):
    options: TiersOptions = group(TiersOptions, "tiers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> TiersOptions:
    return flags.read(_Flags, args).options
