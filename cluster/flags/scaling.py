"""Flags of scaling. Without room between the bounds, the counts of `--prefill` and `--decode` stay."""

from __future__ import annotations

import argparse

from twostroke.scaling_config import ScalingConfig


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scaling")
    for role in ("prefill", "decode"):
        for bound in ("min", "max"):
            group.add_argument(
                f"--{bound}-{role}", type=int, metavar="N", help=f"the planner's bound (default: as --{role})"
            )
    group.add_argument(
        "--slo-itl",
        type=float,
        metavar="SECONDS",
        help="keep as many decode workers that a token follows the one before within this, on average (default: as "
        "many as hold the streams); of first tokens, --slo-ttft is promised",
    )
    group.add_argument(
        "--flexible",
        action="store_true",
        help="load what either role needs, for `twostroke role` (default: where both roles have room to scale)",
    )


def config_from(args: argparse.Namespace) -> ScalingConfig:
    return ScalingConfig(
        min_prefill=args.min_prefill,
        max_prefill=args.max_prefill,
        min_decode=args.min_decode,
        max_decode=args.max_decode,
        slo_itl_s=args.slo_itl,
        flexible=args.flexible,
    )
