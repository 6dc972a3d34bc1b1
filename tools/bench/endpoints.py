"""Several servers side by side: which they are, what they are called, and how each wants to be asked."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from cluster.flags import client_credentials as credentials
from cluster.flags.client_credentials import ClientTls
from cluster.flags.parser import add_pid
from tools.bench.options import API_KEY_VARIABLE, DEFAULT_URL, DEFAULT_VOCAB_SIZE, Target, own_url, read_key
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting

GRPC_SCHEME, TLS_GRPC_SCHEME = "grpc://", "grpcs://"
SWITCHES = ("text", "chat", "no-ignore-eos")
SETTINGS = ("model", "name", "api-key", "api-key-file")
FORM = f"URL[,{'][,'.join(SWITCHES)}][,{'=...][,'.join(SETTINGS)}=...]"
DRAWN_SEEDS = 1 << 20


@dataclass(frozen=True, slots=True)
class Endpoint:
    name: str
    target: Target
    twin: int
    """How many endpoints before it have the same address: those get prompts of their own, or would find them cached."""


class EndpointSettings(Settings):
    """What holds for every server of a comparison."""

    names: str | None = setting(None, unit="A,B,...", default_text="their addresses", help="what to call them")
    baseline: str | None = setting(None, unit="NAME", default_text="the first", help="ratios are over this one")
    wait_s: float = setting(0.0, least=0, help="time for servers that are still starting")
    temperature: float = setting(0.0, least=0, unit="T", help="temperature of sampling")
    timeout_s: float = setting(600.0, above=0, help="time that one request may take")
    seed: int | None = setting(
        None, least=0, default_text="drawn and reported, so that nothing is cached", help="seed of prompts and arrivals"
    )
    vocab_size: int = setting(DEFAULT_VOCAB_SIZE, least=16, help="token ids are drawn below this")


class _Flags(Settings):
    endpoints: EndpointSettings = group(EndpointSettings, "endpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """The servers of one comparison, and what holds for all of them."""

    all: tuple[Endpoint, ...]
    baseline: str
    seed: int
    vocab_size: int
    wait_s: float

    def __post_init__(self) -> None:
        names = [endpoint.name for endpoint in self.all]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"--names: {', '.join(sorted(twice))} is given twice", field="names")
        if self.baseline not in names:
            raise ConfigError(
                f"--baseline {self.baseline} is none of the endpoints ({', '.join(names)})", field="baseline"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(endpoint.name for endpoint in self.all)

    def prompt_seed(self, endpoint: Endpoint, number: int) -> int:
        """Returns a seed that all endpoints have in common, and that no other `number` of a session has."""
        return (self.seed * 1_000_000 + number) * 16 + endpoint.twin


def add_endpoint_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "urls",
        nargs="*",
        metavar="URL",
        help=f"an OpenAI-compatible server, or grpc://HOST:PORT (grpcs:// over TLS) of ours; in another way by {FORM} "
        f"(default: this user's local server, else {DEFAULT_URL})",
    )
    add_pid(parser)
    flags.add(parser, _Flags)
    credentials.add_tls_flags(parser.add_argument_group("TLS", "for https:// and grpcs://"))


def endpoints_from(args: argparse.Namespace) -> Endpoints:
    """Raises ConfigError."""
    flags_given, tls = flags.read(_Flags, args).endpoints, credentials.tls_from(args)
    specs = [_Spec.parse(text) for text in args.urls or [own_url(args.pid, tls)]]
    names = _names(specs, flags_given.names)
    addresses = [spec.address for spec in specs]
    found = tuple(
        Endpoint(
            name,
            spec.target(flags_given.temperature, flags_given.timeout_s, tls),
            addresses[:index].count(spec.address),
        )
        for index, (name, spec) in enumerate(zip(names, specs, strict=True))
    )
    return Endpoints(
        all=found,
        baseline=flags_given.baseline or found[0].name,
        seed=secrets.randbelow(DRAWN_SEEDS) if flags_given.seed is None else flags_given.seed,
        vocab_size=flags_given.vocab_size,
        wait_s=flags_given.wait_s,
    )


@dataclass(frozen=True, slots=True)
class _Spec:
    """One URL argument, taken apart."""

    address: str
    switches: frozenset[str]
    settings: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> _Spec:
        address, *parts = text.split(",")
        pairs = [part.partition("=") for part in parts]
        switches = frozenset(key for key, equals, _ in pairs if not equals)
        settings = {key: value for key, equals, value in pairs if equals}
        for unknown in sorted((switches - set(SWITCHES)) | (settings.keys() - set(SETTINGS))):
            raise ConfigError(f"{text}: {unknown!r} is not a way to ask a server; the form is {FORM}", field="urls")
        return cls(address.rstrip("/").removesuffix("/v1"), switches, settings)

    def target(self, temperature: float, timeout_s: float, tls: ClientTls | None) -> Target:
        is_grpc = self.address.startswith((GRPC_SCHEME, TLS_GRPC_SCHEME))
        uses_tls = self.address.startswith((TLS_GRPC_SCHEME, "https://"))
        return Target(
            url=DEFAULT_URL if is_grpc else self.address,
            grpc=self.address.partition("://")[2] if is_grpc else None,
            model=self.settings.get("model"),
            chat="chat" in self.switches,
            text="text" in self.switches,
            stream=True,
            ignore_eos="no-ignore-eos" not in self.switches,
            temperature=temperature,
            timeout_s=timeout_s,
            api_key=self._api_key(),
            tls=(tls or ClientTls()) if uses_tls else None,
        )

    def _api_key(self) -> str | None:
        """Raises ConfigError."""
        if (file := self.settings.get("api-key-file")) is not None:
            return read_key("api-key-file", Path(file))
        return self.settings.get("api-key") or os.environ.get(API_KEY_VARIABLE)


def _names(specs: Sequence[_Spec], given: str | None) -> list[str]:
    """Returns the names that --names or `name=` gives, or names made from the addresses."""
    if given is not None:
        names = [name.strip() for name in given.split(",")]
        if len(names) != len(specs) or not all(names):
            raise ConfigError(f"--names {given}: {len(specs)} endpoints need as many names", field="names")
        return names
    names = []
    for spec in specs:
        plain = spec.settings.get("name") or urlsplit(spec.address).netloc or spec.address
        count = sum(name.partition("#")[0] == plain for name in names)
        names.append(f"{plain}#{count + 1}" if count else plain)
    return names
