"""`twostroke pin add | list | remove`: keeps prefixes of prompts in the workers' caches."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from cluster.clients import admin_access
from cluster.clients.admin_access import AdminAccess
from cluster.terminal.shown import print_table, table, values_of, word_of
from twostroke.base.client_text import on_one_line
from twostroke.base.errors import ConfigError
from twostroke.config.cache import memory_bytes
from twostroke.config.duration import duration_s, duration_text
from twostroke.rpc.v1 import inference_pb2, pins_pb2, pins_pb2_grpc

ANSWER_S = 20.0
"""Deadline of a call to a router, which tokenizes the prefix and calls the supervisor."""
LOOK_S = 0.2
"""Seconds between two questions whether a pin is ready."""
MOST_BYTES = 900 << 10
"""Bytes of a prefix: the admin port takes a megabyte in all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add = actions.add_parser(
        "add", help="compute a prefix now, and keep it; a pin of the same prefix only gets the new --expires"
    )
    prefix = add.add_mutually_exclusive_group(required=True)
    prefix.add_argument("--system", metavar="TEXT", help="chats that begin with this system message")
    prefix.add_argument(
        "--chat", metavar="FILE", help="chats that begin with these messages: a list as JSON, or a body"
    )
    prefix.add_argument("--text", metavar="TEXT", help="completions that begin with this text")
    prefix.add_argument("--text-file", metavar="FILE", help="the same from a file; - reads standard input")
    add.add_argument("--owner", default="operator", metavar="NAME", help="who wants it (default: operator)")
    add.add_argument(
        "--tenant",
        default="",
        metavar="NAME",
        help="whose requests it serves (default: those without a tenant, and everybody's where --public-prefix "
        "declares it)",
    )
    add.add_argument(
        "--model", default="", metavar="NAME", help="of an adapter whose requests it serves (default: the model alone)"
    )
    add.add_argument("--cache-salt", default="", metavar="SALT", help="of the requests that it serves (default: none)")
    add.add_argument("--expires", metavar="DURATION", help="30s, 5m, 2h, 7d from now (default: when it is removed)")
    add.add_argument("--max-bytes", metavar="SIZE", help="most bytes at each worker (default: what --pin-cap allows)")
    add.add_argument(
        "--workers",
        default="all",
        metavar="WHICH",
        help="all, prefill, decode, names with commas between them, or how many of each role (default: all)",
    )
    add.add_argument(
        "--wait", default="60s", metavar="DURATION", help="until all of it is computed; 0s: do not wait (default: 60s)"
    )
    listing = actions.add_parser("list", help="show pins: bytes, hits and seconds saved at each worker")
    listing.add_argument("--hints", action="store_true", help="cache hints that requests gave, too")
    remove = actions.add_parser("remove", help="end a pin; its blocks are cached like others from then on")
    remove.add_argument("id", nargs="?", metavar="ID", help="as `pin add` and `pin list` show it")
    remove.add_argument("--owner", metavar="NAME", help="every pin of this owner")
    remove.add_argument("--hints", action="store_true", help="every cache hint that requests gave")
    for each in (add, listing, remove):
        admin_access.add_arguments(each)
        each.add_argument("--json", action="store_true", help="as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    return {"add": _add, "list": _list, "remove": _remove}[args.action](args)


def _add(args: argparse.Namespace) -> int:
    request, wait_s = _request(args), _duration("--wait", args.wait)
    access = admin_access.access_from(args)
    added = _call(access, "Add", request)
    until_s = time.monotonic() + wait_s
    held: Sequence[pins_pb2.HeldPin] = added.held
    while any(map(_may_be_ready_soon, held)) and time.monotonic() < until_s:
        time.sleep(LOOK_S)
        listed = _call(access, "List", pins_pb2.ListPinsRequest())
        held = [each for each in listed.held if each.pin_id == added.pin_id]
    if args.json:
        counts = {"tokens": added.tokens, "pinned": added.pinned_tokens, "public": added.public_tokens}
        print(json.dumps({"pin_id": added.pin_id, **counts, "held": list(map(values_of, held))}))
    else:
        print(_summary(added, args.tenant))
        _print_held(held)
    is_good = all(each.state != pins_pb2.PIN_STATE_FAILED and not _may_be_ready_soon(each) for each in held)
    return 0 if is_good or not wait_s else 1


def _may_be_ready_soon(held: pins_pb2.HeldPin) -> bool:
    """Returns whether a worker computes the pin now, or serves but has not answered yet.

    A worker that has not answered is away with a problem; one that does not serve is away without one.
    """
    is_unanswered = held.state == pins_pb2.PIN_STATE_AWAY and bool(held.problem)
    return held.state == pins_pb2.PIN_STATE_COMPUTING or is_unanswered


def _list(args: argparse.Namespace) -> int:
    request = pins_pb2.ListPinsRequest(hints=args.hints)
    listed = _call(admin_access.access_from(args), "List", request)
    if args.json:
        print(json.dumps({"pins": list(map(values_of, listed.held)), "workers": list(map(values_of, listed.uses))}))
        return 0
    _print_held(listed.held)
    for use in listed.uses:
        print(
            f"{use.worker_id}: pins keep {use.pages_pinned} of {use.pages_total} pages "
            f"({_size(use.pages_pinned * use.page_bytes)}); at most {use.most_pages}; "
            f"cache hints: {use.hints}"
        )
    return 0


def _remove(args: argparse.Namespace) -> int:
    named = [args.id is not None, args.owner is not None, args.hints]
    if sum(named) != 1:
        raise ConfigError("name one pin by its ID, or an --owner, or --hints", field="id")
    if args.id == "" or args.owner == "":
        raise ConfigError("the ID or the --owner is empty", field="id")
    _check_text({"ID": args.id, "--owner": args.owner})
    request = pins_pb2.RemovePinRequest(pin_id=args.id or "", owner=args.owner or "")
    removed = _call(admin_access.access_from(args), "Remove", request).removed
    print(json.dumps({"removed": removed}) if args.json else f"{removed} pin{'s' * (removed != 1)} removed")
    return 0


# Requests


def _request(args: argparse.Namespace) -> pins_pb2.AddPinRequest:
    """Returns the call's request. Raises ConfigError that names the flag."""
    _check_text({
        "--system": args.system, "--text": args.text, "--owner": args.owner, "--tenant": args.tenant,
        "--cache-salt": args.cache_salt, "--workers": args.workers, "--model": args.model,
    })  # fmt: skip
    request = pins_pb2.AddPinRequest(owner=args.owner, tenant=args.tenant, cache_salt=args.cache_salt, model=args.model)
    if not args.owner:
        raise ConfigError("--owner must not be empty", field="--owner")
    if args.system is not None:
        request.chat.messages.add(role="system", content=args.system)
    elif args.chat is not None:
        request.chat.CopyFrom(_chat(args.chat))
    else:
        request.text = args.text if args.text is not None else _read("--text-file", args.text_file)
        if not request.text:
            raise ConfigError("the text of the pin is empty", field="--text")
    if request.ByteSize() > MOST_BYTES:
        raise ConfigError(f"the prefix has {request.ByteSize():,} bytes; at most {MOST_BYTES:,} can be pinned")
    if args.expires is not None:
        request.ttl_s = _duration("--expires", args.expires)
        if not request.ttl_s:
            raise ConfigError("--expires must be more than 0s", field="--expires")
    if args.max_bytes is not None:
        request.max_bytes = _bytes(args.max_bytes)
    _put_workers(request, args.workers)
    return request


def _put_workers(request: pins_pb2.AddPinRequest, value: str) -> None:
    if value.isdecimal():
        if len(value) > 4 or not 0 < int(value) <= 1024:
            raise ConfigError(f"--workers must be from 1 to 1024 of each role, got {value[:40]}", field="--workers")
        request.per_role = int(value)
        return
    names = value.split(",")
    if not all(names):
        raise ConfigError(f"--workers {value!r}: a name is empty", field="--workers")
    request.workers.extend(names)


def _chat(file: str) -> inference_pb2.Chat:
    try:
        value = json.loads(_read("--chat", file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--chat {file} is not valid JSON: {error}", field="--chat") from error
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"--chat {file} must hold a list of messages, and not an empty one", field="--chat")
    chat = inference_pb2.Chat()
    for index, entry in enumerate(messages):
        role, content = (entry.get("role"), entry.get("content")) if isinstance(entry, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise ConfigError(
                f"--chat {file}: messages[{index}] must be an object with role and content, both text", field="--chat"
            )
        _check_text({f"--chat {file}: messages[{index}]": role + content})
        chat.messages.add(role=role, content=content)
    return chat


def _check_text(by_flag: Mapping[str, str | None]) -> None:
    """Raises ConfigError naming the first value that is not valid Unicode, as bytes on a command line need not be."""
    for name, text in by_flag.items():
        try:
            (text or "").encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"{name}: it is not text: {error}", field=name) from error


def _read(flag: str, file: str) -> str:
    try:
        return sys.stdin.buffer.read().decode() if file == "-" else Path(file).read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"{flag} {file}: {error.strerror}", field=flag) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {file}: it is not text: {error}", field=flag) from error


def _duration(flag: str, value: str) -> float:
    try:
        return duration_s(value)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}", field=flag) from error


def _bytes(value: str) -> int:
    try:
        size = memory_bytes(value)
    except ValueError as error:
        raise ConfigError(f"--max-bytes: {error}", field="--max-bytes") from error
    if not size:
        raise ConfigError(f"--max-bytes must be at least 1 byte, got {value}", field="--max-bytes")
    return size


def _call(access: AdminAccess, method: str, request: Message) -> Any:
    return admin_access.first_answer(access, pins_pb2_grpc.PinAdminStub, method, request, ANSWER_S)


# Output


def _summary(added: pins_pb2.AddPinResponse, tenant: str) -> str:
    beyond = added.tokens - added.pinned_tokens
    rest = f"; {beyond} beyond the last full block are not" if beyond else ""
    if added.public_tokens >= added.pinned_tokens:
        serves = "everybody's requests: it is public"
    else:
        serves = f"requests of tenant {tenant!r}" if tenant else "requests without a tenant"
    return f"pin {added.pin_id}: {added.pinned_tokens} of {added.tokens} tokens are pinned{rest}. It serves {serves}."


def _print_held(held: Iterable[pins_pb2.HeldPin]) -> None:
    numbers = ("blocks", "bytes", "hits", "saved", "expires")
    headings = ("pin", "owner", "tenant", "worker", "state", *numbers, "begins")
    pins = table(*headings, numbers=numbers, folded=("begins",))
    now_s = time.time()
    for each in sorted(held, key=lambda each: (each.is_hint, each.owner, each.pin_id, each.worker_id)):
        ends = f"in {duration_text(each.expires_s - now_s)}" if each.HasField("expires_s") else "never"
        owner = "(hint)" if each.is_hint else each.owner
        blocks = f"{each.ready_blocks}/{each.blocks}"
        counts = (blocks, _size(each.bytes), str(each.hits), f"{each.saved_s:.2f} s", ends)
        begins = on_one_line(each.problem or each.text.replace("\n", " "))
        state = word_of(pins_pb2.PinState.DESCRIPTOR, each.state)
        pins.add_row(each.pin_id, owner, each.tenant or "-", each.worker_id, state, *counts, begins)
    print_table(pins, "no pins")


def _size(size_bytes: int) -> str:
    return f"{size_bytes:,} B" if size_bytes < 1 << 20 else f"{size_bytes / (1 << 20):.1f} MiB"
