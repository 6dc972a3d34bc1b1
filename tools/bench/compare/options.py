"""The flags of `bench compare`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cluster.flags.checks import STDOUT, at_least_zero, file_can_be_made, positive
from tools.bench.compare.scenario import Scenario, parse_scenario
from tools.bench.endpoints import Endpoints, add_endpoint_arguments, endpoints_from
from twostroke.errors import ConfigError

DEFAULT_LOADS = (
    "128x128@c1",
    "128x128@c16",
    "1024x128@c1",
    "1024x128@c4",
    "1024x128@c16",
    "burst:1056x128x16",
    "shared:1056/1024x128x16",
)
"""Short and long prompts, alone and together, distinct and with a prefix in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    endpoints: Endpoints
    scenarios: tuple[Scenario, ...]
    rounds: int
    warmup: int
    json_path: str | None
    html_path: str | None

    def __post_init__(self) -> None:
        names = [scenario.name for scenario in self.scenarios]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"--load {', '.join(sorted(twice))} is given twice", field="load")
        positive("--rounds", self.rounds)
        at_least_zero("--warmup", self.warmup)
        file_can_be_made("--json", self.json_path)
        if self.html_path == STDOUT:
            raise ConfigError("--html needs a file's name", field="html")
        file_can_be_made("--html", self.html_path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint_arguments(parser)
    group = parser.add_argument_group("loads; PxO is prompt x output tokens")
    group.add_argument(
        "--load",
        action="append",
        metavar="LOAD",
        help="may be repeated. PxO@cC[xN]: N requests, C open at once; PxO@rR[xN]: R start per second (Poisson); "
        "burst:PxOxN: N at once; shared:P/SxOxN: N at once that have S tokens in common, cold, then warm with new "
        f"endings (default: {' '.join(DEFAULT_LOADS)})",
    )
    group.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="every load goes to every endpoint once per round, with new prompts; the order turns from round to round, "
        "and only one server is under load at a time (default %(default)s)",
    )
    group.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="short requests before each run (default %(default)s)"
    )
    group = parser.add_argument_group("reports beside the table")
    group.add_argument("--json", metavar="FILE", help='"-": to standard output')
    group.add_argument("--html", metavar="FILE", help="one file with figures; needs no network")


def options_from(args: argparse.Namespace) -> CompareOptions:
    return CompareOptions(
        endpoints=endpoints_from(args),
        scenarios=tuple(parse_scenario(text) for text in args.load or DEFAULT_LOADS),
        rounds=args.rounds,
        warmup=args.warmup,
        json_path=args.json,
        html_path=args.html,
    )
