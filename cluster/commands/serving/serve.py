"""`twostroke serve`: turns flags into a ClusterConfig. Every setting is declared in `twostroke.config`."""

from __future__ import annotations

import argparse

from cluster.flags.choices import CHOICES
from twostroke.config import ClusterConfig, flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, ClusterConfig, CHOICES)


def config_from(args: argparse.Namespace) -> ClusterConfig:
    """Raises ConfigError that names the flag."""
    return flags.read(ClusterConfig, args)


def run(args: argparse.Namespace) -> int:
    from cluster.launch.launcher import serve  # imported here: help needs none of it

    return serve(config_from(args))
