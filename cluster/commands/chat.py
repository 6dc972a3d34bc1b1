"""`twostroke chat`: one question, or a conversation, streamed over HTTP or gRPC."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import sys
from collections.abc import Iterator
from typing import Any

from cluster import state_file
from cluster.router_process import reachable
from twostroke.errors import ConfigError, InvalidRequest, NotFound, PeerLost

ANSWER_S = 300.0
"""Longest silence of the server."""

Message = dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", help="ask this and end (default: a conversation until Ctrl-D)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--http", metavar="HOST:PORT", help="of the server (default: this user's local server)")
    where.add_argument(
        "--grpc", nargs="?", const="", metavar="HOST:PORT", help="speak gRPC (default: to this user's local server)"
    )
    parser.add_argument("--pid", type=int, help="of the `twostroke serve` that is meant, if several are running")
    parser.add_argument("--system", help="a system message to begin with")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of each answer (default: the server's)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: always the likeliest token")
    parser.add_argument("--seed", type=int, help="equal seeds, equal answers")


def run(args: argparse.Namespace) -> int:
    ask = _grpc_client(args) if args.grpc is not None else _http_client(args)
    messages: list[Message] = [{"role": "system", "content": args.system}] if args.system else []
    if args.message is not None:
        _turn(ask, messages, args.message)
        return 0
    while (said := _read_line()) is not None:
        if said.strip():
            _turn(ask, messages, said)
    return 0


def _read_line() -> str | None:
    with contextlib.suppress(EOFError):
        return input("> " if sys.stdin.isatty() else "")
    return None


def _turn(ask: Any, messages: list[Message], said: str) -> None:
    messages.append({"role": "user", "content": said})
    answer = ""
    for piece in ask(messages):
        answer += piece
        print(piece, end="", flush=True)
    print()
    messages.append({"role": "assistant", "content": answer})


def _http_client(args: argparse.Namespace) -> Any:
    address = reachable(args.http or state_file.the_one_running(args.pid).http)
    options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
    options = {name: value for name, value in options.items() if value is not None}

    def ask(messages: list[Message]) -> Iterator[str]:
        body = {"model": _served_model(address), "messages": messages, "stream": True, **options}
        yield from _stream_http(address, body)

    return ask


def _connect(address: str) -> http.client.HTTPConnection:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--http must be HOST:PORT, got {address!r}", field="--http")
    return http.client.HTTPConnection(host, int(port), timeout=ANSWER_S)


def _served_model(address: str) -> str:
    connection = _connect(address)
    try:
        connection.request("GET", "/v1/models")
        models = json.loads(connection.getresponse().read())["data"]
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise PeerLost(f"{address}: {error}") from error
    finally:
        connection.close()
    if not models:
        raise NotFound(f"{address} serves no model")
    return str(models[0]["id"])


def _stream_http(address: str, body: dict[str, Any]) -> Iterator[str]:
    connection = _connect(address)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise InvalidRequest(f"{address}: {answer.status}: {_error_text(answer.read())}")
        for line in answer:
            field, _, value = line.decode().strip().partition(": ")
            if field != "data" or value == "[DONE]":
                continue
            event = json.loads(value)
            if "error" in event:
                raise PeerLost(f"{address}: {event['error']['message']}")
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
    except (OSError, http.client.HTTPException) as error:
        raise PeerLost(f"{address}: {error}") from error
    finally:
        connection.close()


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")


def _grpc_client(args: argparse.Namespace) -> Any:
    import grpc

    from cluster.commands.rpc import describe
    from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

    address = reachable(args.grpc or state_file.the_one_running(args.pid).grpc)
    channel = grpc.insecure_channel(address)
    stub = inference_pb2_grpc.InferenceStub(channel)
    sampling = inference_pb2.SamplingOptions(temperature=args.temperature, seed=args.seed)
    stop = inference_pb2.StopOptions(max_tokens=args.max_tokens)

    def ask(messages: list[Message]) -> Iterator[str]:
        chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**message) for message in messages])
        request = inference_pb2.GenerateRequest(chat=chat, sampling=sampling, stop=stop)
        try:
            for response in stub.Generate(request, timeout=ANSWER_S):
                yield response.text
        except grpc.RpcError as error:
            raise PeerLost(f"{address}: {describe(error)}") from error

    return ask
