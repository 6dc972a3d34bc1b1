"""The flags of `bench compare`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from cluster.flags.checks import STDOUT, file_can_be_made
from tools.bench.compare.scenario import Scenario, parse_scenario
from tools.bench.endpoints import Endpoints, add_endpoint_arguments, endpoints_from
from tools.output import page_can_be_made
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting

EPILOG = """examples:
  twostroke bench compare http://127.0.0.1:8000 http://127.0.0.1:8001 --names ours,other --html report.html
  twostroke bench compare URL_A URL_B,text,no-ignore-eos --load 1024x128@c4 --load shared:1056/1024x128x16 --rounds 5
"""

DEFAULT_LOADS = (
    "128x128@c1",
    "128x128@c16",
    "1024x128@c1",
    "1024x128@c4",
    "1024x128@c16",
    "burst:1056x128x16",
    "shared:1056/1024x128x16",
)
"""Short and long prompts, one at a time and together, distinct and with a common prefix."""


class Rounds(Settings):
    """Which loads are sent how often."""

    loads: tuple[str, ...] = setting(
        (),
        flag="--load",
        unit="LOAD",
        default_text=" ".join(DEFAULT_LOADS),
        help="may be repeated. PxO@cC[xN]: N requests, C open at once; PxO@rR[xN]: R start per second (Poisson); "
        "burst:PxOxN: N at once; shared:P/SxOxN: N at once that have S tokens in common, cold, then warm with new "
        "endings; chats:NxT/G:S+UxO@cC: N chats of T turns over G system prompts of S tokens, U tokens said and O "
        "answered in each turn, C open at once: first turns, then all later ones",
    )
    rounds: int = setting(
        3,
        least=1,
        help="every load goes to every endpoint once per round, with new prompts; the order turns from round to round, "
        "and only one server is under load at a time",
    )
    warmup: int = setting(1, least=0, help="short requests before each run")


class ResultFiles(Settings):
    """The file that results are written to, beside the table."""

    json_path: str | None = setting(None, flag="--json", unit="FILE", help='"-": to standard output')
    html_path: str | None = setting(None, flag="--html", unit="FILE", help="one file with figures; needs no network")

    def model_post_init(self, _context: Any) -> None:
        file_can_be_made("--json", self.json_path)
        if self.html_path == STDOUT:
            raise ConfigError("--html needs a file's name", field="--html")
        page_can_be_made(self.html_path)


class _Flags(Settings):
    rounds: Rounds = group(Rounds, "loads", "loads; PxO is prompt x output tokens")
    reports: ResultFiles = group(ResultFiles, "reports", "reports beside the table")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    endpoints: Endpoints
    scenarios: tuple[Scenario, ...]
    rounds: int
    warmup: int
    json_path: str | None
    html_path: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint_arguments(parser)
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> CompareOptions:
    """Raises ConfigError."""
    flags_given = flags.read(_Flags, args)
    loads = flags_given.rounds.loads or DEFAULT_LOADS
    if twice := sorted({load for load in loads if loads.count(load) > 1}):
        raise ConfigError(f"--load {', '.join(twice)} is given twice", field="--load")
    return CompareOptions(
        endpoints=endpoints_from(args),
        scenarios=tuple(map(parse_scenario, loads)),
        rounds=flags_given.rounds.rounds,
        warmup=flags_given.rounds.warmup,
        **dict(flags_given.reports),
    )
