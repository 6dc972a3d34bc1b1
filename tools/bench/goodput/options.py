"""The flags of `bench goodput`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from cluster.flags.checks import file_can_be_made, positive
from tools.bench.endpoints import Endpoints, add_endpoint_arguments, endpoints_from
from tools.rate_search import Limits
from twostroke.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a request must meet to count."""

    ttft_s: float
    inter_token_s: float
    """Bound on the request's own 99th percentile."""
    share: float
    """Share of a run's requests that must meet both."""

    def __post_init__(self) -> None:
        positive("--slo-ttft", self.ttft_s)
        positive("--slo-itl", self.inter_token_s)
        if not 0 < self.share <= 1:
            raise ConfigError(f"--share must be above 0 and at most 1, got {self.share:g}", field="share")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputOptions:
    endpoints: Endpoints
    promise: Promise
    limits: Limits
    prompt_tokens: int
    output_tokens: int
    arrivals: str
    duration_s: float
    min_requests: int
    votes: int
    json_path: str | None

    def __post_init__(self) -> None:
        positive("--prompt-tokens", self.prompt_tokens)
        positive("--output-tokens", self.output_tokens)
        positive("--duration", self.duration_s)
        positive("--min-requests", self.min_requests)
        if self.votes < 1 or self.votes % 2 == 0:
            raise ConfigError(f"--votes must be odd, so that one side wins, got {self.votes}", field="votes")
        file_can_be_made("--json", self.json_path)

    def requests_at(self, rate: float) -> int:
        return max(self.min_requests, round(rate * self.duration_s))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_endpoint_arguments(parser)
    group = parser.add_argument_group("the promise")
    group.add_argument(
        "--slo-ttft", type=float, default=3.0, metavar="SECONDS", help="to the first token (default %(default)s)"
    )
    group.add_argument(
        "--slo-itl",
        type=float,
        default=80.0,
        metavar="MILLISECONDS",
        help="for a request's own inter-token p99 (default %(default)s)",
    )
    group.add_argument(
        "--share", type=float, default=0.9, help="of the requests that must meet both (default %(default)s)"
    )
    group = parser.add_argument_group("requests")
    group.add_argument("--prompt-tokens", type=int, default=1024, metavar="N", help="(default %(default)s)")
    group.add_argument("--output-tokens", type=int, default=128, metavar="N", help="(default %(default)s)")
    group.add_argument("--arrivals", choices=("poisson", "constant"), default="poisson", help="(default %(default)s)")
    group = parser.add_argument_group("search")
    group.add_argument(
        "--duration",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="of arrivals at one rate; a run ends as soon as its verdict is certain (default %(default)s)",
    )
    group.add_argument(
        "--min-requests", type=int, default=20, metavar="N", help="of a run, at any rate (default %(default)s)"
    )
    group.add_argument(
        "--votes",
        type=int,
        default=1,
        metavar="N",
        help="runs per rate, with other arrivals, of which the majority counts: 3 on a machine that is not quiet "
        "(default %(default)s)",
    )
    group.add_argument(
        "--start-rate", type=float, default=0.5, metavar="PER_SECOND", help="tried first (default %(default)s)"
    )
    group.add_argument("--min-rate", type=float, default=0.02, metavar="PER_SECOND", help="(default %(default)s)")
    group.add_argument("--max-rate", type=float, default=1000.0, metavar="PER_SECOND", help="(default %(default)s)")
    group.add_argument(
        "--precision",
        type=float,
        default=0.1,
        metavar="FRACTION",
        help="end when the lowest failing rate is this little above the highest passing one (default %(default)s)",
    )
    group.add_argument("--json", metavar="FILE", help='"-": to standard output')


def options_from(args: argparse.Namespace) -> GoodputOptions:
    return GoodputOptions(
        endpoints=endpoints_from(args),
        promise=Promise(ttft_s=args.slo_ttft, inter_token_s=args.slo_itl / 1e3, share=args.share),
        limits=Limits(start=args.start_rate, lowest=args.min_rate, highest=args.max_rate, precision=args.precision),
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        arrivals=args.arrivals,
        duration_s=args.duration,
        min_requests=args.min_requests,
        votes=args.votes,
        json_path=args.json,
    )
