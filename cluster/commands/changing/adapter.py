"""`twostroke adapter`: LoRA adapters that are served in addition to the model, each under its own name."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from cluster.clients import admin_access
from cluster.terminal.shown import print_table, table, values_of
from twostroke.base.client_text import on_one_line
from twostroke.rpc.v1 import adapters_pb2, adapters_pb2_grpc

ANSWER_S = 60.0
"""Seconds for a router to read an adapter, which may have gigabytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    load = commands.add_parser("load", help="serve the adapter in a folder that PEFT wrote")
    load.add_argument("name", help="what clients call it")
    load.add_argument("folder", help="below one of --lora-dirs, as routers see it")
    load.add_argument(
        "--replace", action="store_true", help="the name may have an adapter; requests that have begun keep theirs"
    )
    unload = commands.add_parser("unload", help="withdraw a name; requests that have begun continue")
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
    loaded = _call(args, "Load", request).adapter
    if args.json:
        print(json.dumps(_values(loaded)))
    else:
        print(f"{loaded.name} is served: adapter rank {loaded.lora_rank}, digest {loaded.adapter.digest.hex()}")
    return 0


def _unload(args: argparse.Namespace) -> int:
    request = adapters_pb2.UnloadAdapterRequest(name=args.name)
    _call(args, "Unload", request)
    print(json.dumps({"unloaded": args.name}) if args.json else f"{args.name} is withdrawn")
    return 0


def _list(args: argparse.Namespace) -> int:
    listed = _call(args, "List", adapters_pb2.ListAdaptersRequest()).adapters
    if args.json:
        print(json.dumps({"adapters": [_values(each) for each in listed]}))
        return 0
    adapters = table("name", "rank", "parameters", "digest", "folder")
    for each in listed:
        digest, folder = each.adapter.digest.hex(), on_one_line(each.adapter.path)
        adapters.add_row(on_one_line(each.name), str(each.lora_rank), f"{each.parameters:,}", digest, folder)
    print_table(adapters, "no adapters")
    return 0


def _values(each: adapters_pb2.NamedAdapter) -> dict[str, Any]:
    values = values_of(each)
    adapter, lora_rank = values.pop("adapter"), values.pop("lora_rank")
    return {**values, "rank": lora_rank, "digest": adapter["digest"], "folder": adapter["path"]}


def _call(args: argparse.Namespace, method: str, request: Message) -> Any:
    access = admin_access.access_from(args)
    return admin_access.first_answer(access, adapters_pb2_grpc.AdapterAdminStub, method, request, ANSWER_S)
