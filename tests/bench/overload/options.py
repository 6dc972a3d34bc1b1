"""The flags of `tests.bench overload`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cluster.flags.checks import file_can_be_made, positive
from tools.bench.endpoints import Endpoints, add_endpoint_arguments, endpoints_from
from twostroke.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadOptions:
    endpoints: Endpoints
    """One; its timeout is the deadline that every request brings."""
    prompt_tokens: int
    output_tokens: int
    loads: tuple[float, ...]
    """Loads as multiples of the capacity."""
    capacity_per_s: float | None
    """None: measured first."""
    concurrency: int
    duration_s: float
    rounds: int
    json_path: str | None

    def __post_init__(self) -> None:
        if len(self.endpoints.all) != 1:
            raise ConfigError(f"one server is overloaded at a time, got {len(self.endpoints.all)}", field="urls")
        positive("--prompt-tokens", self.prompt_tokens)
        positive("--output-tokens", self.output_tokens)
        positive("--capacity", self.capacity_per_s)
        positive("--concurrency", self.concurrency)
        positive("--duration", self.duration_s)
        positive("--rounds", self.rounds)
        for load in self.loads:
            positive("--loads", load)
        if self.duration_s <= 2 * self.deadline_s:
            raise ConfigError(
                f"--duration must be more than twice --timeout ({self.deadline_s:g} s), got {self.duration_s:g}: what "
                "comes and goes within the first one is not counted",
                field="duration",
            )
        file_can_be_made("--json", self.json_path)

    @property
    def deadline_s(self) -> float:
        return self.endpoints.all[0].target.timeout_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint_arguments(parser)
    parser.set_defaults(timeout=5.0)
    group = parser.add_argument_group("load")
    group.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="(default %(default)s)")
    group.add_argument("--output-tokens", type=int, default=64, metavar="N", help="(default %(default)s)")
    group.add_argument(
        "--loads", default="1,2,3", metavar="X,Y,...", help="times the capacity, in turns (default %(default)s)"
    )
    group.add_argument(
        "--capacity",
        type=float,
        metavar="PER_SECOND",
        help="requests that the server can answer (default: measured first, with --concurrency open)",
    )
    group.add_argument(
        "--concurrency", type=int, default=32, metavar="N", help="to measure the capacity (default %(default)s)"
    )
    group.add_argument(
        "--duration", type=float, default=60.0, metavar="SECONDS", help="of one run (default %(default)s)"
    )
    group.add_argument("--rounds", type=int, default=1, metavar="N", help="medians count (default %(default)s)")
    group.add_argument("--json", metavar="FILE", help='"-": to standard output')


def options_from(args: argparse.Namespace) -> OverloadOptions:
    try:
        loads = tuple(float(load) for load in args.loads.split(","))
    except ValueError as error:
        raise ConfigError(f"--loads must be numbers, as in 1,2,3, got {args.loads!r}", field="loads") from error
    return OverloadOptions(
        endpoints=endpoints_from(args),
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        loads=loads,
        capacity_per_s=args.capacity,
        concurrency=args.concurrency,
        duration_s=args.duration,
        rounds=args.rounds,
        json_path=args.json,
    )
