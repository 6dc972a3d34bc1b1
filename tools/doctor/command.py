"""`twostroke doctor`: does a prompt that was sent before get reused, and if not, why not?"""

from __future__ import annotations

import argparse
import dataclasses
import json

import grpc
from rich.console import Console

from cluster.clients import admin_access, state_file
from cluster.clients.admin_access import AdminAccess
from cluster.flags import client_credentials as credentials
from cluster.flags.client_credentials import ClientTls
from router.addresses import reachable
from tools.clients.connect import tls_endpoint
from tools.doctor.diagnosis import Diagnosis, diagnose
from tools.doctor.endpoints import ChatEndpoint, GrpcEndpoint, HttpEndpoint
from tools.doctor.examine import examine, grpc_address_of
from tools.doctor.facts import Facts
from twostroke.base.errors import ConfigError

_OPTIONS = (("grpc.max_receive_message_length", -1),)
"""The router's index comes as one message per worker, however much it holds."""
MAX_SALTS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grpc", metavar="HOST:PORT", help="send the chats here (default: where --admin says)")
    parser.add_argument("--url", metavar="URL", help="send the chats here, over HTTP (default: over gRPC)")
    credentials.add_tls_flags(parser)
    admin_access.add_arguments(parser)
    parser.add_argument(
        "--cache-salt",
        action="append",
        default=[],
        metavar="SALT",
        help="as your clients send it; given twice, the chats have one each (default: none)",
    )
    parser.add_argument("--json", action="store_true", help="verdict and all that was seen, as JSON")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if all that can be reused was reused, else 1."""
    salts = _salts(args.cache_salt)
    tls = credentials.tls_from(args)
    admin = _admin(args)
    with admin.channel(admin.addresses[0], _OPTIONS) as channel:
        address = args.grpc or grpc_address_of(channel, admin)
        with _channel(reachable(address), tls) as clients:
            endpoint: ChatEndpoint = (
                HttpEndpoint(args.url, tls) if args.url is not None else GrpcEndpoint(clients, address)
            )
            facts = examine(channel, admin, endpoint, salts)
    verdict = diagnose(facts)
    if args.json:
        print(json.dumps({"verdict": dataclasses.asdict(verdict), "facts": facts.as_json()}))
    else:
        _print(verdict, facts)
    return 0 if verdict.is_fine else 1


def _channel(address: str, tls: ClientTls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address)
    tls_channel = tls_endpoint(tls)
    return grpc.secure_channel(address, tls_channel.credentials, options=list(tls_channel.options))


def _salts(given: list[str]) -> tuple[str, str]:
    if len(given) > MAX_SALTS:
        raise ConfigError(f"--cache-salt may be given twice, got {len(given)}", field="--cache-salt")
    return (given[0], given[-1]) if given else ("", "")


def _admin(args: argparse.Namespace) -> AdminAccess:
    """Returns the access to the server that the chats go to, where that is one of this user's."""
    server = args.url or args.grpc
    if args.admin is not None or args.pid is not None or server is None:
        return admin_access.access_from(args)
    for state in state_file.running():
        ends = tuple(reachable(each) for router in state.routers for each in (router.http, router.grpc))
        if server.rstrip("/").removesuffix("/v1").endswith(ends):
            return admin_access.access_to(state)
    raise ConfigError(f"{server}: say where its admin port is, with --admin HOST:PORT", field="--admin")


def _print(verdict: Diagnosis, facts: Facts) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for name, chat in (("first", facts.first), ("second", facts.second)):
        console.print(f"{name} chat: {len(chat.tokens)} tokens, {chat.cached_tokens} reused", markup=False)
    for worker in facts.workers:
        console.print(f"{worker.worker}: {worker.state}, holds {worker.held_blocks} blocks of it", markup=False)
    for worker in facts.workers:
        for further in worker.further.values():
            for line in [] if further is None else further.lines(worker.worker):
                console.print(line, markup=False)
    console.print(f"{verdict.cause}: {verdict.finding}", style="green" if verdict.is_fine else "red", markup=False)
    if verdict.remedy:
        console.print(f"try: {verdict.remedy}", markup=False)
