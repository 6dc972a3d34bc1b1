"""The flags of `tests.trials.bench overload`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from cluster.flags.checks import file_can_be_made, positive
from tests.trials.bench.options import json_file
from tools.bench.endpoints import Endpoints, add_endpoint_arguments, endpoints_from
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting


class OverLoad(Settings):
    """What is asked of the server, and how much of it."""

    prompt_tokens: int = setting(512, least=1, help="length of prompts")
    output_tokens: int = setting(64, least=1, help="length of outputs")
    loads: str = setting("1,2,3", unit="X,Y,...", help="times the capacity, in turns")
    capacity_per_s: float | None = setting(
        None,
        flag="--capacity",
        above=0,
        unit="PER_SECOND",
        default_text="measured first, with --concurrency open",
        help="requests that the server can answer",
    )
    concurrency: int = setting(32, least=1, help="open requests, to measure the capacity")
    duration_s: float = setting(60.0, above=0, help="time of one run")
    rounds: int = setting(1, least=1, help="rounds, of which medians count")
    json_path: str | None = json_file()

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)
        for multiple in self.multiples:
            positive("--loads", multiple)

    @property
    def multiples(self) -> tuple[float, ...]:
        try:
            return tuple(float(load) for load in self.loads.split(","))
        except ValueError as error:
            raise ConfigError(f"--loads must be numbers, as in 1,2,3, got {self.loads!r}", field="--loads") from error


class _Flags(Settings):
    load: OverLoad = group(OverLoad, "load")


@dataclass(frozen=True, slots=True)
class OverloadOptions:
    endpoints: Endpoints
    """One; its timeout is the deadline that every request brings."""
    load: OverLoad

    def __post_init__(self) -> None:
        if len(self.endpoints.all) != 1:
            raise ConfigError(f"one server is overloaded at a time, got {len(self.endpoints.all)}", field="urls")
        if self.load.duration_s <= 2 * self.deadline_s:
            raise ConfigError(
                f"--duration must be more than twice --timeout ({self.deadline_s:g} s), got {self.load.duration_s:g}: "
                "what comes and goes within the first one is not counted",
                field="duration",
            )

    @property
    def deadline_s(self) -> float:
        return self.endpoints.all[0].target.timeout_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint_arguments(parser)
    parser.set_defaults(timeout=5.0)
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> OverloadOptions:
    return OverloadOptions(endpoints_from(args), flags.read(_Flags, args).load)
