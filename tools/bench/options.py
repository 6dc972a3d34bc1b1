"""The flags of `twostroke bench`: declared, defaulted and checked here. No heavy import: the CLI's --help reads it."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cluster.clients import state_file
from cluster.clients.state_file import the_one_for_clients
from cluster.flags import client_credentials as credentials
from cluster.flags.checks import Ignored, file_can_be_made, is_host_port
from cluster.flags.client_credentials import ClientTls
from cluster.flags.parser import add_pid
from router.addresses import reachable
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_VOCAB_SIZE = 30000
"""Fits every tokenizer in use; our gRPC tells the true size."""
API_KEY_VARIABLE = "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server that requests go to, and the form of the requests."""

    url: str
    grpc: str | None
    model: str | None
    chat: bool
    text: bool
    stream: bool
    ignore_eos: bool
    temperature: float
    timeout_s: float
    api_key: str | None = field(repr=False)
    tls: ClientTls | None = None
    """Over gRPC, None: plain. Over HTTP the URL says that, and None: the system's CAs."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must look like {DEFAULT_URL}, got {self.url!r}", field="url")
        if self.tls is not None and self.grpc is None and parts.scheme != "https":
            raise ConfigError(
                f"--url must begin with https:// where --tls-... or TWOSTROKE_TLS_... ask for TLS, got {self.url!r}",
                field="url",
            )
        if self.grpc is not None and not is_host_port(self.grpc):
            raise ConfigError(f"--grpc must look like 127.0.0.1:50051, got {self.grpc!r}", field="grpc")
        if self.grpc is not None and not self.stream:
            raise ConfigError("--no-stream does not go with --grpc: Generate always streams", field="stream")

    @property
    def sends_text(self) -> bool:
        """Whether chat messages hold words, never token ids."""
        return self.text or self.chat

    @property
    def name(self) -> str:
        if self.grpc is not None:
            return f"grpc://{self.grpc}"
        return f"{self.base_url}/v1/{'chat/completions' if self.chat else 'completions'}"

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


class RequestForm(Settings):
    """The form of every request."""

    chat: bool = setting(False, help="send chat messages (of words) instead of completions")
    text: bool = setting(False, help="send words, about one token each, to servers that take no token ids")
    stream: bool = setting(True, help="stream answers; without, only end-to-end times are measured")
    ignore_eos: bool = setting(True, help="ask for exactly --output-tokens; turn off for servers that refuse the field")
    temperature: float = setting(0.0, least=0, unit="T", help="temperature of sampling")
    timeout_s: float = setting(600.0, above=0, help="time that one request may take")


class RequestPace(Settings):
    """How many requests are sent, and when."""

    num_requests: int = setting(100, least=1, help="how many requests are measured")
    rate: float | None = setting(
        None, above=0, unit="PER_SECOND", help="open loop: requests start at this rate, answered or not"
    )
    arrivals: str = setting("poisson", choices=("poisson", "constant"), help="how the starts of --rate are spread")
    concurrency: int | None = setting(
        None, least=1, default_text="1, unless --rate or --trace is given", help="keep N requests open"
    )
    """None with no rate: the trace's own times."""
    warmup: int = setting(0, least=0, help="requests sent first and not measured")
    json_path: str | None = setting(
        None, flag="--json", unit="FILE", help='also write the report as JSON ("-": to standard output)'
    )

    def model_post_init(self, _context: Any) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError(
                "--rate and --concurrency exclude each other: an open loop never waits for answers", field="--rate"
            )
        file_can_be_made("--json", self.json_path)


class Prompts(Settings):
    """Which prompts are sent. With a trace, lengths and sharing come from its rows."""

    prompt_tokens: int = setting(256, least=1, help="length of prompts, with the shared prefix")
    prompt_spread: float = setting(
        0.0, least=0, below=1, unit="FRACTION", help="draw lengths uniformly within this fraction of --prompt-tokens"
    )
    output_tokens: int = setting(64, least=1, help="length of outputs")
    shared_prefix_tokens: int = setting(0, least=0, help="tokens that prompts of a group have in common")
    prefix_groups: int = setting(1, least=1, help="distinct shared prefixes")
    seed: int = setting(
        0, least=0, help="seed of prompts and arrivals; a server that has seen a seed may have its prompts cached"
    )
    vocab_size: int | None = setting(
        None,
        least=16,
        default_text=f"what a --grpc server says, else {DEFAULT_VOCAB_SIZE}",
        help="token ids are drawn below this",
    )

    @property
    def shortest(self) -> int:
        return max(1, round(self.prompt_tokens * (1 - self.prompt_spread)))

    @property
    def longest(self) -> int:
        return max(1, round(self.prompt_tokens * (1 + self.prompt_spread)))


class TraceReplay(Settings):
    """Which recorded requests are sent."""

    trace: str | None = setting(
        None,
        is_path=True,
        unit="FILE",
        help="requests to replay: Mooncake's JSON lines {timestamp (ms), input_length, output_length, hash_ids} (equal "
        "ids are equal blocks of 512 tokens), Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens), or a log written "
        "by `serve --request-log`. Replaces the prompt flags; its times hold unless --rate or --concurrency is given",
    )
    trace_scale: float = setting(1.0, above=0, unit="FACTOR", help="stretch its times; 0.5 replays twice as fast")
    trace_length_scale: float = setting(1.0, above=0, unit="FACTOR", help="shrink its lengths and blocks alike")
    trace_jitter_s: float = setting(
        0.0,
        least=0,
        zero="raw",
        help="spread recorded times by a seeded uniform delay: some traces stamp in buckets of 3 s",
    )
    trace_limit: int | None = setting(None, least=1, help="only its first N rows")


class BenchLoad(Settings):
    """What is sent."""

    form: RequestForm = group(RequestForm, "form", "form of requests")
    pace: RequestPace = group(RequestPace, "pace", "how many, how fast")
    prompts: Prompts = group(Prompts, "prompts", "which prompts")
    replay: TraceReplay = group(TraceReplay, "replay", "trace replay")

    def model_post_init(self, _context: Any) -> None:
        prompts = self.prompts
        if self.replay.trace is None and prompts.shared_prefix_tokens >= prompts.shortest:
            raise ConfigError(
                f"--shared-prefix-tokens {prompts.shared_prefix_tokens} leaves no token of its own to the shortest "
                f"prompt ({prompts.shortest} tokens); raise --prompt-tokens, which counts the prefix too",
                field="--shared-prefix-tokens",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    target: Target
    pace: RequestPace
    prompts: Prompts
    replay: TraceReplay


IGNORED = (
    Ignored(("--url",), lambda args: args.grpc is not None, "--grpc replaces it"),
    Ignored(
        ("--pid",),
        lambda args: bool(args.grpc) or (args.url is not None and args.grpc is None),
        "it names this user's own server, and an address is given",
    ),
    Ignored(
        ("--num-requests", "--prompt-tokens", "--prompt-spread", "--output-tokens"),
        lambda args: args.trace is not None,
        "--trace replaces it",
    ),
    Ignored(("--shared-prefix-tokens", "--prefix-groups"), lambda args: args.trace is not None, "--trace replaces it"),
    Ignored(("--prefix-groups",), lambda args: not args.shared_prefix_tokens, "it needs --shared-prefix-tokens"),
    Ignored(
        ("--trace-scale", "--trace-length-scale", "--trace-jitter", "--trace-limit"),
        lambda args: args.trace is None,
        "it needs --trace",
    ),
    Ignored(
        ("--trace-scale", "--trace-jitter"),
        lambda args: args.rate is not None or args.concurrency is not None,
        "--rate and --concurrency replace the trace's times",
    ),
    Ignored(("--arrivals",), lambda args: args.rate is None, "it needs --rate"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_target(parser.add_argument_group("where to"))
    flags.add(parser, BenchLoad)


def options_from(args: argparse.Namespace) -> BenchOptions:
    """Raises ConfigError or NotFound."""
    load = flags.read(BenchLoad, args)
    tls = credentials.tls_from(args)
    url, grpc = _address(args, tls)
    pace = load.pace
    if pace.concurrency is None and pace.rate is None and load.replay.trace is None:
        pace = pace.replace(concurrency=1)
    target = Target(url=url, grpc=grpc, model=args.model, **dict(load.form), api_key=_api_key(args), tls=tls)
    return BenchOptions(target=target, pace=pace, prompts=load.prompts, replay=load.replay)


def _add_target(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--url", help=f"OpenAI-compatible server (default: this user's local server, else {DEFAULT_URL})"
    )
    group.add_argument(
        "--grpc",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="use twostroke's gRPC Generate instead of --url (default: of this user's local server)",
    )
    add_pid(group)
    group.add_argument("--model", help="model name to ask for (default: the first that the server lists)")
    key = group.add_mutually_exclusive_group()
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="with the bearer token")
    key.add_argument(
        "--api-key",
        metavar="KEY",
        help="the same, for all who run ps to read (default: the variable "
        f"{API_KEY_VARIABLE}, or {credentials.API_KEY_VARIABLE})",
    )
    credentials.add_tls_flags(group)


def _address(args: argparse.Namespace, tls: ClientTls | None) -> tuple[str, str | None]:
    """Returns the URL, and HOST:PORT of the gRPC API where that is to be used. Raises ConfigError or NotFound."""
    if args.grpc:
        return args.url or DEFAULT_URL, args.grpc
    if args.grpc is not None:
        return args.url or DEFAULT_URL, reachable(the_one_for_clients(args.pid, speaks_tls=tls is not None).grpc)
    return args.url or own_url(args.pid, tls), None


def own_url(pid: int | None, tls: ClientTls | None) -> str:
    """Returns the URL of this user's local server; the usual one where none is running and none is asked for."""
    if pid is None and not state_file.running():
        return DEFAULT_URL
    state = the_one_for_clients(pid, speaks_tls=tls is not None)
    return f"{'https' if state.has_tls else 'http'}://{reachable(state.http)}"


def _api_key(args: argparse.Namespace) -> str | None:
    """Raises ConfigError."""
    if args.api_key_file is not None:
        return read_key("--api-key-file", args.api_key_file)
    return args.api_key or os.environ.get(API_KEY_VARIABLE) or credentials.api_key() or None


def read_key(flag: str, path: Path) -> str:
    """Raises ConfigError that names the flag, and shows nothing of what is in the file."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{flag} {path} cannot be read: {why}", field="api_key_file") from error
    if not key or len(key.split()) > 1:
        raise ConfigError(f"{flag} {path} must hold one word, the key", field="api_key_file")
    return key
