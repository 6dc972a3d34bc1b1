"""What routers do with requests, and with workers that are silent."""

from __future__ import annotations

import argparse

from cluster.flags.defaults import DEFAULTS, with_default
from router.routing.policies import POLICIES


def add(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--policy",
        choices=sorted(POLICIES),
        default=DEFAULTS.policy,
        help=with_default("how requests find their workers"),
    )
    group.add_argument(
        "--seed",
        type=int,
        default=DEFAULTS.seed,
        help="of everything the router draws (default: from the operating system)",
    )
    group.add_argument(
        "--request-log",
        default=DEFAULTS.request_log,
        metavar="FILE",
        help="append a line of JSON for every answer: times, placement, predictions, block names, no text "
        "(default: none)",
    )
    group.add_argument(
        "--slo-ttft",
        type=float,
        default=DEFAULTS.slo_ttft_s,
        metavar="SECONDS",
        help="refuse requests (429 with Retry-After) whose first token is predicted later than this (default: none)",
    )
    group.add_argument(
        "--suspect-after",
        type=float,
        default=DEFAULTS.patience.suspect_after_s,
        metavar="SECONDS",
        help=with_default("a worker that is silent for so long gets no new work"),
    )
    group.add_argument(
        "--dead-after",
        type=float,
        default=DEFAULTS.patience.dead_after_s,
        metavar="SECONDS",
        help=with_default("what a worker has that is silent for so long goes on elsewhere"),
    )
    group.add_argument(
        "--max-held",
        type=int,
        default=DEFAULTS.max_held,
        metavar="N",
        help=with_default("requests that may wait in a router for their turn"),
    )
    group.add_argument(
        "--public-prefix",
        action="append",
        default=[],
        metavar="FILE",
        help='a beginning of prompts that tenants may share: text, or FILE.json with {"messages": [...]}; may be given '
        "several times (default: tenants share nothing)",
    )
