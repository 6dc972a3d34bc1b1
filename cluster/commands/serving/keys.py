"""`twostroke keys add | list | revoke`: edits the file of API keys that routers read (`serve --api-keys`)."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import os
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import yaml

from cluster.terminal.shown import print_table, table
from router.auth.api_keys import KeyEntry, KeyFile, draw_key, parse_keys
from twostroke.base.errors import ConfigError, NotFound

_DAYS = re.compile(r"(\d{1,5})d")
_HEADINGS = ("id", "tenant", "requests/min", "tokens/min", "at once", "class", "expires", "state")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    add = actions.add_parser("add", help="draw a key, print it once, and keep its hash")
    add.add_argument(
        "--tenant",
        required=True,
        metavar="NAME",
        help="tenant of the key: its requests share prefixes, turns and streams with that tenant's",
    )
    add.add_argument("--requests-per-minute", type=float, metavar="N", help="(default: no limit)")
    add.add_argument("--tokens-per-minute", type=float, metavar="N", help="of prompts and answers (default: no limit)")
    add.add_argument(
        "--concurrency", type=int, metavar="N", help="answers at once: all choices of all prompts (default: no limit)"
    )
    add.add_argument(
        "--max-priority",
        type=int,
        default=0,
        metavar="CLASS",
        help="highest class of its requests, from -100 to 100; those that ask for more have this one (default: 0)",
    )
    add.add_argument("--expires", metavar="WHEN", help="2027-01-31, or 90d from now (default: never)")
    add.add_argument(
        "--operator",
        action="store_true",
        help="it opens the console: requests of all tenants, and what operators do to workers",
    )
    listing = actions.add_parser("list", help="show the keys' ids, tenants and limits")
    listing.add_argument("--json", action="store_true", help="as JSON instead of a table")
    revoke = actions.add_parser("revoke", help="make a key invalid")
    revoke.add_argument("id", metavar="ID", help="the 12 digits after ts-; the whole key will do")
    for each in (add, listing, revoke):
        each.add_argument("--file", required=True, type=Path, metavar="FILE", help="file of the keys; `add` creates it")


def run(args: argparse.Namespace) -> int:
    {"add": _add, "list": _list, "revoke": _revoke}[args.action](args)
    return 0


def _add(args: argparse.Namespace) -> None:
    drawn = draw_key()
    try:
        entry = KeyEntry(
            tenant=args.tenant,
            sha256=drawn.sha256,
            requests_per_minute=args.requests_per_minute,
            tokens_per_minute=args.tokens_per_minute,
            concurrency=args.concurrency,
            max_priority=args.max_priority,
            expires=_when(args.expires),
            operator=args.operator,
        )
    except ConfigError as error:
        flag = f"--{str(error.field).replace('_', '-')}"
        raise ConfigError(error.message.replace(str(error.field), flag, 1), field=flag) from error
    if _state(entry, datetime.now(UTC).timestamp()) == "expired":
        raise ConfigError(f"--expires {args.expires} is over: nobody could use the key", field="--expires")
    with _locked(args.file):
        file = _read(args.file) if args.file.exists() else KeyFile()
        _write(args.file, KeyFile(keys={**file.keys, drawn.id: entry}))
    print(f"the key of {args.tenant}, shown this once; {args.file} has its hash:", file=sys.stderr)
    print(drawn.key)


def _list(args: argparse.Namespace) -> None:
    keys, now_s = _read(args.file).keys, datetime.now(UTC).timestamp()
    if args.json:
        print(json.dumps({key_id: _public(entry) for key_id, entry in keys.items()}))
        return
    listed = table(*_HEADINGS)
    for key_id, entry in keys.items():
        limits = (entry.requests_per_minute, entry.tokens_per_minute, entry.concurrency, entry.max_priority)
        shown = ("-" if limit is None else f"{limit:g}" for limit in limits)
        listed.add_row(key_id, entry.tenant, *shown, entry.expires or "-", _state(entry, now_s))
    print_table(listed)


def _revoke(args: argparse.Namespace) -> None:
    key_id = args.id.removeprefix("ts-").partition("-")[0]
    with _locked(args.file):
        keys = _read(args.file).keys
        if key_id not in keys:
            raise NotFound(f"{args.file} has no key {key_id!r}; `twostroke keys list` shows them", field="id")
        _write(args.file, KeyFile(keys={**keys, key_id: dataclasses.replace(keys[key_id], disabled=True)}))
    print(f"{key_id} is revoked; routers that read {args.file} know in a second or two")


def _state(entry: KeyEntry, now_s: float) -> str:
    expires_s = entry.expires_s()
    if entry.disabled:
        return "revoked"
    return "expired" if expires_s is not None and now_s >= expires_s else "good"


def _public(entry: KeyEntry) -> dict[str, object]:
    return {name: value for name, value in dataclasses.asdict(entry).items() if name != "sha256"}


def _when(value: str | None) -> str | None:
    days = _DAYS.fullmatch(value or "")
    if days is None:
        return value
    return (datetime.now(UTC) + timedelta(days=int(days[1]))).isoformat(timespec="seconds")


def _read(path: Path) -> KeyFile:
    try:
        return parse_keys(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"--file {path}: {reason}", field="--file") from error


def _write(path: Path, file: KeyFile) -> None:
    """Replaces the file at once, since routers may be reading. Only this user may read a new file."""
    keys = {
        key_id: {name: value for name, value in dataclasses.asdict(entry).items() if value not in (None, False)}
        for key_id, entry in file.keys.items()
    }
    unfinished = path.with_name(f".{path.name}.unfinished")
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as out:
            yaml.safe_dump({"keys": keys}, out, sort_keys=False)
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"--file {path} cannot be written: {error.strerror}", field="--file") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lets one operator after the other edit the file."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"--file {path}: {error.strerror}", field="--file") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
