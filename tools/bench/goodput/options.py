"""The flags of `bench goodput`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from cluster.flags.checks import file_can_be_made
from tools.bench.endpoints import Endpoints, add_endpoint_arguments, endpoints_from
from tools.rate_search import SearchLimits
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting

EPILOG = """examples:
  twostroke bench goodput http://127.0.0.1:8000 --slo-ttft 3 --slo-itl 80
  twostroke bench goodput URL_A URL_B --names ours,other --prompt-tokens 1024 --output-tokens 128 --duration 60
"""


class Slo(Settings):
    """What a request must meet to count."""

    ttft_s: float = setting(3.0, above=0, flag="--slo-ttft", help="time to the first token")
    inter_token_ms: float = setting(
        80.0, above=0, flag="--slo-itl", unit="MILLISECONDS", help="a request's own inter-token p99"
    )
    share: float = setting(0.9, above=0, most=1, unit="FRACTION", help="share of the requests that must meet both")

    @property
    def inter_token_s(self) -> float:
        return self.inter_token_ms / 1e3


class Requests(Settings):
    """What is asked."""

    prompt_tokens: int = setting(1024, least=1, help="length of prompts")
    output_tokens: int = setting(128, least=1, help="length of outputs")
    arrivals: str = setting("poisson", choices=("poisson", "constant"), help="how starts are spread")


class Search(Settings):
    """How the highest rate is searched."""

    duration_s: float = setting(
        60.0, above=0, help="time of arrivals at one rate; a run ends as soon as its verdict is certain"
    )
    min_requests: int = setting(20, least=1, help="requests of a run, at any rate")
    votes: int = setting(
        1,
        least=1,
        help="runs per rate, with other arrivals, of which the majority counts: 3 on a machine that is not quiet",
    )
    start_rate: float = setting(0.5, above=0, unit="PER_SECOND", help="rate that is tried first")
    min_rate: float = setting(0.02, above=0, unit="PER_SECOND", help="lowest rate")
    max_rate: float = setting(1000.0, above=0, unit="PER_SECOND", help="highest rate")
    precision: float = setting(
        0.1,
        above=0,
        unit="FRACTION",
        help="end when the lowest failing rate is this little above the highest passing one",
    )
    json_path: str | None = setting(None, flag="--json", unit="FILE", help='report; "-": to standard output')

    def model_post_init(self, _context: Any) -> None:
        if self.votes % 2 == 0:
            raise ConfigError(f"--votes must be odd, so that one side wins, got {self.votes}", field="--votes")
        file_can_be_made("--json", self.json_path)
        _ = self.limits  # they are checked when they are made

    @property
    def limits(self) -> SearchLimits:
        return SearchLimits(
            start=self.start_rate, lowest=self.min_rate, highest=self.max_rate, precision=self.precision
        )

    def requests_at(self, rate: float) -> int:
        return max(self.min_requests, round(rate * self.duration_s))


class _Flags(Settings):
    promise: Slo = group(Slo, "promise", "the promise")
    requests: Requests = group(Requests, "requests")
    search: Search = group(Search, "search")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputOptions:
    endpoints: Endpoints
    promise: Slo
    requests: Requests
    search: Search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint_arguments(parser)
    flags.add(parser, _Flags)


def options_from(args: argparse.Namespace) -> GoodputOptions:
    """Raises ConfigError."""
    return GoodputOptions(endpoints=endpoints_from(args), **dict(flags.read(_Flags, args)))
