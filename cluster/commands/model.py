"""`twostroke model pull NAME`: fetch a model's files before the first `serve` needs them."""

from __future__ import annotations

import argparse

from cluster.announce import fetch_with_progress
from twostroke.config import ModelConfig
from twostroke.errors import ConfigError
from twostroke.models.catalog import locate

DEFAULTS = ModelConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    pull = actions.add_parser("pull", help="fetch a model into the cache", description="Fetch a model into the cache.")
    pull.add_argument(
        "name", nargs="?", default=DEFAULTS.model, help="of the catalogue, or a hub id (default: %(default)s)"
    )
    pull.add_argument("--dtype", default=DEFAULTS.dtype, help="the one that will be served (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    model = ModelConfig(model=args.name, dtype=args.dtype)
    if model.is_paced:
        raise ConfigError(f"{model.model} has no files to fetch", field="name")
    print(locate(model.model, model.dtype) or fetch_with_progress(model.model, model.dtype))
    return 0
