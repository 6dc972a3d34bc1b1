"""`twostroke adapter`: LoRA adapters that are served in addition to the model, each under its own name."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from rich import box
from rich.console import Console
from rich.table import Table

from cluster.clients import admin_access
from twostroke.base.client_text import on_one_line
from twostroke.rpc.v1 import adapters_pb2, adapters_pb2_grpc

ANSWER_S = 60.0
"""Seconds for a router to read an adapter, which may have gigabytes."""
PIPE_COLUMNS = 200
"""Width of tables that no terminal shows."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    load = commands.add_parser("load", help="serve the adapter in a folder that PEFT wrote")
    load.add_argument("name", help="what clients call it")
    load.add_argument("folder", help="below one of --lora-dirs, as routers see it")
    load.add_argument(
        "--replace", action="store_true", help="the name may have an adapter; requests that have begun keep theirs"
    )
    unload = commands.add_parser("unload", help="withdraw a name; requests that have begun go on")
    unload.add_argument("name")
    listing = commands.add_parser("list", help="show what is served")
    for each, run_action in ((load, _load), (unload, _unload), (listing, _list)):
        each.add_argument("--json", action="store_true", help="print JSON")
        admin_access.add_arguments(each)
        each.set_defaults(action_of=run_action)


def run(args: argparse.Namespace) -> int:
    action: Callable[[argparse.Namespace], int] = args.action_of
    return action(args)


def _load(args: argparse.Namespace) -> int:
    folder = os.path.abspath(args.folder)
    request = adapters_pb2.LoadAdapterRequest(name=args.name, path=folder, replace=args.replace)
    loaded = _call(args, "Load", request, adapters_pb2.LoadAdapterResponse).adapter
    if args.json:
        print(json.dumps(_values(loaded)))
    else:
        print(f"{loaded.name} is served: rank {loaded.rank}, digest {loaded.adapter.digest.hex()}")
    return 0


def _unload(args: argparse.Namespace) -> int:
    request = adapters_pb2.UnloadAdapterRequest(name=args.name)
    _call(args, "Unload", request, adapters_pb2.UnloadAdapterResponse)
    print(json.dumps({"unloaded": args.name}) if args.json else f"{args.name} is withdrawn")
    return 0


def _list(args: argparse.Namespace) -> int:
    listed = _call(args, "List", adapters_pb2.ListAdaptersRequest(), adapters_pb2.ListAdaptersResponse).adapters
    if args.json:
        print(json.dumps({"adapters": [_values(each) for each in listed]}))
        return 0
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("name", "rank", "parameters", "digest", "folder"):
        table.add_column(heading, no_wrap=True)
    for each in listed:
        digest, folder = each.adapter.digest.hex(), on_one_line(each.adapter.path)
        table.add_row(on_one_line(each.name), str(each.rank), f"{each.parameters:,}", digest, folder)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)
    console.print(table if table.row_count else "no adapters")
    return 0


def _values(each: adapters_pb2.NamedAdapter) -> dict[str, Any]:
    return {
        "name": each.name,
        "digest": each.adapter.digest.hex(),
        "folder": each.adapter.path,
        "rank": each.rank,
        "parameters": each.parameters,
        "loaded_s": each.loaded_s,
    }


def _call(args: argparse.Namespace, method: str, request: Message, kind: type[Any]) -> Any:
    access, stub = admin_access.access_from(args), adapters_pb2_grpc.AdapterAdminStub
    return admin_access.first_answer(access, stub, method, request, kind, ANSWER_S)
