"""`twostroke reload`: all workers load other weights, one at a time, while requests are answered."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.clients import supervisor_access
from cluster.commands.changing.drain import add_common_arguments, check_deadline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default="",
        help="a model of the same shape with the same tokenizer, as `serve --model` takes it (default: the model that "
        "is served, whose directory has other weights by now)",
    )
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_deadline(args.deadline)
    # Workers have another working directory.
    model = str(Path(args.model).resolve()) if args.model and Path(args.model).exists() else args.model
    waiting = supervisor_access.ask(args, "reload", model=model, deadline_s=args.deadline)
    print(f"all workers serve with the weights of {args.model or 'the same directory, loaded again'}")
    for worker in waiting:
        print(f"but {worker}, which waits for a Ray node with room: it will begin with these weights")
    return 0
