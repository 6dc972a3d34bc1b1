"""`twostroke serve`: flags to ClusterConfig. Every setting is declared in `twostroke.config`."""

from __future__ import annotations

import argparse

from router.routing.policies import POLICIES
from twostroke.config import ClusterConfig, flags

CHOICES = {"--policy": sorted(POLICIES)}
"""Words that the settings do not know."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, ClusterConfig, CHOICES)


def config_from(args: argparse.Namespace) -> ClusterConfig:
    """Raises ConfigError that names the flag."""
    return flags.read(ClusterConfig, args)


def run(args: argparse.Namespace) -> int:
    from cluster.launcher import serve  # only now: help needs nothing of what a cluster is made of

    return serve(config_from(args))
