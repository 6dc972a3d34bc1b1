"""The flags of `twostroke bench`: declared, defaulted and checked here. No heavy import: the CLI's --help reads it."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from cluster.clients import credentials
from cluster.clients.credentials import ClientTls
from cluster.flags.checks import Ignored, at_least_zero, file_can_be_made, is_host_port, positive
from cluster.flags.parser import add_pid
from cluster.launch import state_file
from cluster.launch.state_file import the_one_for_clients
from router.addresses import reachable
from twostroke.errors import ConfigError

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
        at_least_zero("--temperature", self.temperature)
        positive("--timeout", self.timeout_s)

    @property
    def sends_text(self) -> bool:
        """Chat messages hold words, never token ids."""
        return self.text or self.chat

    @property
    def name(self) -> str:
        if self.grpc is not None:
            return f"grpc://{self.grpc}"
        return f"{self.base_url}/v1/{'chat/completions' if self.chat else 'completions'}"

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Which prompts. With a trace, lengths and sharing come from its rows."""

    num_requests: int
    prompt_tokens: int
    prompt_spread: float
    output_tokens: int
    shared_prefix_tokens: int
    prefix_groups: int
    seed: int
    vocab_size: int | None
    trace: Path | None
    trace_scale: float
    trace_length_scale: float
    trace_jitter_s: float
    trace_limit: int | None

    def __post_init__(self) -> None:
        positive("--num-requests", self.num_requests)
        positive("--prompt-tokens", self.prompt_tokens)
        positive("--output-tokens", self.output_tokens)
        positive("--prefix-groups", self.prefix_groups)
        positive("--trace-scale", self.trace_scale)
        positive("--trace-length-scale", self.trace_length_scale)
        positive("--trace-limit", self.trace_limit)
        at_least_zero("--trace-jitter", self.trace_jitter_s)
        at_least_zero("--shared-prefix-tokens", self.shared_prefix_tokens)
        at_least_zero("--seed", self.seed)
        if not 0 <= self.prompt_spread < 1:
            raise ConfigError(
                f"--prompt-spread must be in [0, 1), got {self.prompt_spread:g}: 0.3 draws lengths within 30 %",
                field="prompt_spread",
            )
        if self.vocab_size is not None and self.vocab_size < 16:
            raise ConfigError(f"--vocab-size must be at least 16, got {self.vocab_size}", field="vocab_size")
        if self.trace is None and self.shared_prefix_tokens >= self.shortest_prompt:
            raise ConfigError(
                f"--shared-prefix-tokens {self.shared_prefix_tokens} leaves no token of its own to the shortest prompt "
                f"({self.shortest_prompt} tokens); raise --prompt-tokens, which counts the prefix too",
                field="shared_prefix_tokens",
            )

    @property
    def shortest_prompt(self) -> int:
        return max(1, round(self.prompt_tokens * (1 - self.prompt_spread)))

    @property
    def longest_prompt(self) -> int:
        return max(1, round(self.prompt_tokens * (1 + self.prompt_spread)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    target: Target
    workload: Workload
    rate: float | None
    """Requests per second of an open loop. None with no concurrency: the trace's own times."""
    arrivals: str
    concurrency: int | None
    warmup: int
    json_path: str | None

    def __post_init__(self) -> None:
        positive("--rate", self.rate)
        positive("--concurrency", self.concurrency)
        at_least_zero("--warmup", self.warmup)
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError(
                "--rate and --concurrency exclude each other: an open loop never waits for answers", field="rate"
            )
        file_can_be_made("--json", self.json_path)


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
    _add_load(parser.add_argument_group("how many, how fast"))
    _add_prompts(parser.add_argument_group("which prompts"))
    _add_trace(parser.add_argument_group("trace replay"))


def options_from(args: argparse.Namespace) -> Options:
    tls = credentials.tls_from(args)
    url, grpc = _address(args, tls)
    has_no_pace = args.concurrency is None and args.rate is None and args.trace is None
    return Options(
        target=Target(
            url=url,
            grpc=grpc,
            model=args.model,
            chat=args.chat,
            text=args.text,
            stream=args.stream,
            ignore_eos=args.ignore_eos,
            temperature=args.temperature,
            timeout_s=args.timeout,
            api_key=_api_key(args),
            tls=tls,
        ),
        workload=Workload(
            num_requests=args.num_requests,
            prompt_tokens=args.prompt_tokens,
            prompt_spread=args.prompt_spread,
            output_tokens=args.output_tokens,
            shared_prefix_tokens=args.shared_prefix_tokens,
            prefix_groups=args.prefix_groups,
            seed=args.seed,
            vocab_size=args.vocab_size,
            trace=args.trace,
            trace_scale=args.trace_scale,
            trace_length_scale=args.trace_length_scale,
            trace_jitter_s=args.trace_jitter,
            trace_limit=args.trace_limit,
        ),
        rate=args.rate,
        arrivals=args.arrivals,
        concurrency=1 if has_no_pace else args.concurrency,
        warmup=args.warmup,
        json_path=args.json,
    )


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
    group.add_argument("--chat", action="store_true", help="send chat messages (of words) instead of completions")
    group.add_argument(
        "--text", action="store_true", help="send words, about one token each, to servers that take no token ids"
    )
    group.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="stream answers (default); without, only end-to-end times are measured",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly --output-tokens (default); turn off for servers that refuse the field",
    )
    group.add_argument("--temperature", type=float, default=0.0, help="(default %(default)s)")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="of one request (default %(default)s)"
    )
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
    """URL, and HOST:PORT of the gRPC API where that is to be used. Raises ConfigError or NotFound."""
    if args.grpc:
        return args.url or DEFAULT_URL, args.grpc
    if args.grpc is not None:
        return args.url or DEFAULT_URL, reachable(the_one_for_clients(args.pid, speaks_tls=tls is not None).grpc)
    return args.url or own_url(args.pid, tls), None


def own_url(pid: int | None, tls: ClientTls | None) -> str:
    """Return the URL of this user's local server; the usual one where none is running and none is asked for."""
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
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{flag} {path} cannot be read: {why}", field="api_key_file") from error
    if not key or len(key.split()) > 1:
        raise ConfigError(f"{flag} {path} must hold one word, the key", field="api_key_file")
    return key


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-requests", type=int, default=100, metavar="N", help="(default %(default)s)")
    group.add_argument(
        "--rate", type=float, metavar="PER_SECOND", help="open loop: requests start at this rate, answered or not"
    )
    group.add_argument(
        "--arrivals", choices=("poisson", "constant"), default="poisson", help="of --rate (default %(default)s)"
    )
    group.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="keep N requests open (default: 1, unless --rate or --trace is given)",
    )
    group.add_argument(
        "--warmup", type=int, default=0, metavar="N", help="requests sent first and not measured (default %(default)s)"
    )
    group.add_argument("--json", metavar="FILE", help='also write the report as JSON ("-": to standard output)')


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompt-tokens", type=int, default=256, metavar="N", help="with the shared prefix (default %(default)s)"
    )
    group.add_argument(
        "--prompt-spread",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="draw lengths uniformly within this fraction of --prompt-tokens (default %(default)s)",
    )
    group.add_argument("--output-tokens", type=int, default=64, metavar="N", help="(default %(default)s)")
    group.add_argument(
        "--shared-prefix-tokens", type=int, default=0, metavar="N", help="that prompts of a group have in common"
    )
    group.add_argument(
        "--prefix-groups", type=int, default=1, metavar="N", help="distinct shared prefixes (default %(default)s)"
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of prompts and arrivals; a server that has seen a seed may have its prompts cached (default %(default)s)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help=f"token ids are drawn below this (default: what a --grpc server says, else {DEFAULT_VOCAB_SIZE})",
    )


def _add_trace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests to replay: Mooncake's JSON lines {timestamp (ms), input_length, output_length, hash_ids} (equal "
        "ids are equal blocks of 512 tokens), Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens), or a log written "
        "by `serve --request-log`. Replaces the prompt flags; its times hold unless --rate or --concurrency is given",
    )
    group.add_argument(
        "--trace-scale", type=float, default=1.0, metavar="FACTOR", help="stretch its times; 0.5 replays twice as fast"
    )
    group.add_argument(
        "--trace-length-scale", type=float, default=1.0, metavar="FACTOR", help="shrink its lengths and blocks alike"
    )
    group.add_argument(
        "--trace-jitter",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="spread recorded times by a seeded uniform delay: some traces stamp in buckets of 3 s (default: raw)",
    )
    group.add_argument("--trace-limit", type=int, metavar="N", help="only its first N rows")
