"""`twostroke chat`: one question or a conversation, streamed over HTTP or gRPC; it continues when a router dies."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import sys

from cluster.clients.state_file import the_one_for_clients
from cluster.flags import client_credentials as credentials
from cluster.flags.client_credentials import ClientTls
from cluster.flags.parser import USAGE_ERROR, add_pid
from router.addresses import reachable
from tools.chat.conversation import Conversation
from tools.chat.server import ChatServer, GrpcServer, HttpChatServer, Sampling
from twostroke.base.errors import ConfigError, ContextLengthExceeded, ServeError

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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
    add_pid(parser)
    credentials.add_tls_flags(parser)
    parser.add_argument("--tls", action="store_true", help="TLS with the system's CAs; the flags above mean it, too")
    parser.add_argument("--system", help="a system message to begin with")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of each answer (default: the server's)")
    sampling = parser.add_argument_group("sampling", "by default as the model recommends, else as the server does")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    sampling.add_argument("--top-p", type=float, metavar="P", help="only tokens that together are so likely")
    sampling.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    sampling.add_argument("--seed", type=int, help="equal seeds, equal answers")


def run(args: argparse.Namespace) -> int:
    chat = _Chat(_server(args), Conversation(args.system))
    if args.message is not None:
        chat.ask(args.message)
        return 0
    return chat.converse() if sys.stdin.isatty() and sys.stdout.isatty() else chat.answer_lines()


class _Chat:
    def __init__(self, server: ChatServer, conversation: Conversation) -> None:
        self._server = server
        self._conversation = conversation

    def ask(self, text: str) -> None:
        """Asks and prints the answer. The server ends it by ServeError, the user by Ctrl-C; what came of it is kept."""
        self._conversation.ask(text)
        came: list[str] = []
        try:
            asyncio.run(self._stream(came))
        finally:
            self._conversation.answered("".join(came))
            print()

    async def _stream(self, came: list[str]) -> None:
        async with contextlib.aclosing(self._server.answer(self._conversation.messages)) as pieces:
            async for piece in pieces:
                came.append(piece)
                print(visible(piece) if sys.stdout.isatty() else piece, end="", flush=True)

    def answer_lines(self) -> int:
        """Asks each line of a pipe or a file."""
        status = 0
        for line in sys.stdin:
            if line.strip():
                status = max(status, self._ask_and_tell(line.rstrip("\n")))
        return status

    def converse(self) -> int:
        """Reads and answers questions until the user leaves."""
        from tools.chat.prompt import Prompt

        prompt = Prompt()
        print(f"{asyncio.run(self._server.served()).model or 'a model'} at {self._server.address}; ", end="")
        print("/help shows commands, Ctrl-D leaves")
        while True:
            try:
                line = prompt.read()
            except KeyboardInterrupt:
                continue
            except EOFError:
                return 0
            if line.startswith("/"):
                if self._carries_out(line):
                    return 0
            elif line.strip():
                self._ask_and_tell(line)

    def _carries_out(self, line: str) -> bool:
        """Carries out a command. Returns True for the command to leave."""
        try:
            reply = self._conversation.command(line)
        except ConfigError as error:
            print(error.message)
            return False
        if reply.text:
            print(reply.text)
        return reply.leaves

    def _ask_and_tell(self, text: str) -> int:
        """Asks and prints an error, which does not end the conversation."""
        try:
            self.ask(text)
        except ServeError as error:
            hint = " (/new forgets the conversation so far)" if isinstance(error, ContextLengthExceeded) else ""
            print(f"twostroke: {error.message}{hint}", file=sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            print("(ended)")
        return 0


def visible(text: str) -> str:
    """Shows control characters as ^X: a model must not send commands to the terminal."""
    return _CONTROL.sub(lambda found: f"^{chr(ord(found[0]) % 32 + 64)}", text)


def _server(args: argparse.Namespace) -> ChatServer:
    secure = credentials.tls_from(args) or (ClientTls() if args.tls else None)
    sampling = Sampling(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, seed=args.seed
    )
    if args.grpc is not None:
        routers = _addresses(args.grpc, "--grpc") or [the_one_for_clients(args.pid, speaks_tls=secure is not None).grpc]
        return GrpcServer([reachable(router) for router in routers], sampling, credentials.api_key(), secure)
    routers = _addresses(args.http, "--http") or [the_one_for_clients(args.pid, speaks_tls=secure is not None).http]
    return HttpChatServer([reachable(router) for router in routers], sampling, credentials.api_key(), secure)


def _addresses(value: str | None, flag: str) -> list[str]:
    addresses = [address.strip() for address in (value or "").split(",") if address.strip()]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"{flag} must be HOST:PORT, got {address!r}", field=flag)
    return addresses
