"""Flags for traces: where they are sent, and how many of them."""

from __future__ import annotations

import argparse

from twostroke.tracing.config import TracingConfig

DEFAULTS = TracingConfig()


def add(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tracing")
    group.add_argument(
        "--otlp-endpoint",
        default=DEFAULTS.otlp_endpoint,
        metavar="URL",
        help="send spans of requests to this OpenTelemetry collector over OTLP/gRPC, as http://HOST:4317 "
        "(default: keep those of the latest requests, for `twostroke trace`)",
    )
    group.add_argument(
        "--trace-ratio",
        type=float,
        default=DEFAULTS.ratio,
        metavar="SHARE",
        help="of requests whose clients do not say themselves whether their trace is sampled (default: %(default)s)",
    )


def config_from(args: argparse.Namespace) -> TracingConfig:
    """Raises ConfigError that names the flag."""
    return TracingConfig(otlp_endpoint=args.otlp_endpoint, ratio=args.trace_ratio)
