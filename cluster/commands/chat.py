"""`twostroke chat`: one question, or a conversation, streamed over HTTP or gRPC; goes on when a router dies."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable

from cluster import state_file
from cluster.clients import api_key
from cluster.clients.resuming import ResumingClient
from cluster.flags import client_tls, pid
from cluster.flags.client_tls import ClientTls
from cluster.state_file import ServeState
from router.addresses import reachable
from twostroke.errors import ConfigError
from twostroke.rpc.v1 import inference_pb2

ANSWER_S = 300.0
"""Longest silence of the server."""

Message = dict[str, str]
Connect = Callable[[], ResumingClient]
Ask = Callable[[ResumingClient, list[Message]], AsyncIterator[str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", help="ask this and end (default: a conversation until Ctrl-D)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--http", metavar="HOST:PORT[,...]", help="of the server (default: this user's local server)")
    where.add_argument(
        "--grpc",
        nargs="?",
        const="",
        metavar="HOST:PORT[,...]",
        help="speak gRPC (default: to this user's local server)",
    )
    pid.add(parser)
    client_tls.add(parser)
    parser.add_argument("--tls", action="store_true", help="TLS with the system's CAs; the flags above mean it, too")
    parser.add_argument("--system", help="a system message to begin with")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of each answer (default: the server's)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, help="equal seeds, equal answers")


def run(args: argparse.Namespace) -> int:
    connect, ask = _grpc(args) if args.grpc is not None else _http(args)
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    if args.message is not None:
        asyncio.run(_turn(connect, ask, messages, args.message))
        return 0
    while (said := _read_line()) is not None:
        if said.strip():
            asyncio.run(_turn(connect, ask, messages, said))
    return 0


def _read_line() -> str | None:
    with contextlib.suppress(EOFError):
        return input("> " if sys.stdin.isatty() else "")
    return None


async def _turn(connect: Connect, ask: Ask, messages: list[Message], said: str) -> None:
    messages.append({"role": "user", "content": said})
    answer = ""
    async with connect() as client:
        async for piece in ask(client, messages):
            answer += piece
            print(piece, end="", flush=True)
    print()
    messages.append({"role": "assistant", "content": answer})


def _http(args: argparse.Namespace) -> tuple[Connect, Ask]:
    secure = client_tls.tls_from(args) or (ClientTls() if args.tls else None)
    routers = _addresses(args.http, "--http") or [reachable(router.http) for router in _own(args.pid, secure).routers]
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    options = {name: value for name, value in options.items() if value is not None}

    async def ask(client: ResumingClient, messages: list[Message]) -> AsyncIterator[str]:
        async for chunk in client.stream("/v1/chat/completions", {"messages": messages, **options}):
            for choice in chunk["choices"]:
                yield choice["delta"].get("content") or ""

    return lambda: ResumingClient(http=routers, silence_s=ANSWER_S, begin_s=0, api_key=api_key.own(), tls=secure), ask


def _grpc(args: argparse.Namespace) -> tuple[Connect, Ask]:
    secure = client_tls.tls_from(args) or (ClientTls() if args.tls else None)
    routers = _addresses(args.grpc, "--grpc") or [reachable(router.grpc) for router in _own(args.pid, secure).routers]
    sampling = inference_pb2.SamplingOptions(temperature=args.temperature, seed=args.seed)
    stop = inference_pb2.StopOptions(max_tokens=args.max_tokens)

    async def ask(client: ResumingClient, messages: list[Message]) -> AsyncIterator[str]:
        chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message) for message in messages])
        request = inference_pb2.GenerateRequest(chat=chat, sampling=sampling, stop=stop)
        async for response in client.generate(request):
            yield response.text

    return lambda: ResumingClient(grpc=routers, silence_s=ANSWER_S, begin_s=0, api_key=api_key.own(), tls=secure), ask


def _own(pid: int | None, secure: ClientTls | None) -> ServeState:
    """This user's server."""
    state = state_file.the_one_running(pid)
    if state.has_tls and secure is None:
        raise ConfigError(
            "this user's server speaks TLS: say --tls-ca FILE, the CA that its certificate comes from", field="--tls-ca"
        )
    return state


def _addresses(said: str | None, flag: str) -> list[str]:
    addresses = [address.strip() for address in (said or "").split(",") if address.strip()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"{flag} must be HOST:PORT, got {address!r}", field=flag)
    return [reachable(address) for address in addresses]
