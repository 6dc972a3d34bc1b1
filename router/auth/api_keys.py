"""API keys of clients, with their limits, and the operator's key, which is derived from the cluster's token.

A key is `ts-ID-SECRET`. The file has the SHA-256 of each whole key by id, and never the key. A secret of 256 random
bits cannot be guessed from its hash, so neither salt nor a slow hash would protect anything. A key is looked up by its
id, which is not secret, and compared by hash, in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import yaml

from twostroke.base.errors import ConfigError, InvalidApiKey
from twostroke.base.json_values import from_values

ID_BYTES = 6
SECRET_BYTES = 32
MAX_TENANT_CHARS = 256
MOST_PRIORITY = 100
"""The highest class of requests. The lowest is its negative. Classes are few, as each wake of the queue visits all."""
OPERATOR_PREFIX = "tso-"
"""Prefix of the operator's key. Keys of clients begin with `ts-`."""
_SCHEME = re.compile(r"bearer +(.+)", re.IGNORECASE)
_KEY = re.compile(r"ts-([0-9a-f]{12})-[0-9a-f]{64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_NOBODYS_HASH = "0" * 64
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEntry:
    tenant: str
    """Tenant of its requests. Prefixes, turns in the admission queue and streams belong to tenants."""
    sha256: str
    """Hash of the whole key, in hexadecimal digits."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Tokens per minute of prompts and outputs together."""
    concurrency: int | None = None
    """Most choices at once: those of all prompts of its open calls, and one for each call of another kind."""
    max_priority: int = 0
    """The highest class of its requests. A request for a higher one gets this one."""
    expires: str | None = None
    """End of its validity in ISO 8601, in UTC unless it names a time zone. None: never."""
    operator: bool = False
    """Whether the key opens the console, which shows requests of all tenants and controls workers."""
    disabled: bool = False

    def __post_init__(self) -> None:
        if not 1 <= len(self.tenant) <= MAX_TENANT_CHARS or not self.tenant.isprintable():
            raise ConfigError(f"tenant must be printable and of 1 to {MAX_TENANT_CHARS} characters", field="tenant")
        if not _HASH.fullmatch(self.sha256):
            raise ConfigError("sha256 must be 64 hexadecimal digits", field="sha256")
        for name in ("requests_per_minute", "tokens_per_minute", "concurrency"):
            limit: float | None = getattr(self, name)
            if limit is not None and not 0 < limit < float("inf"):
                raise ConfigError(f"{name} must be positive and finite, got {limit}", field=name)
        if not -MOST_PRIORITY <= self.max_priority <= MOST_PRIORITY:
            raise ConfigError(
                f"max_priority must be from -{MOST_PRIORITY} to {MOST_PRIORITY}, got {self.max_priority}",
                field="max_priority",
            )
        self.expires_s()

    def expires_s(self) -> float | None:
        """Returns the end of its validity in Unix seconds."""
        if self.expires is None:
            return None
        try:
            when = datetime.fromisoformat(self.expires)
        except ValueError as error:
            raise ConfigError(
                f"expires must be a date such as 2027-01-31 or 2027-01-31T12:00:00+00:00, got {self.expires!r}",
                field="expires",
            ) from error
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    keys: dict[str, KeyEntry] = field(default_factory=dict)
    """Keys by id."""


@dataclass(frozen=True, slots=True)
class NewKey:
    id: str
    key: str
    """The key for the client. It is not stored."""
    sha256: str


def draw_key() -> NewKey:
    key_id = secrets.token_hex(ID_BYTES)
    key = f"ts-{key_id}-{secrets.token_hex(SECRET_BYTES)}"
    return NewKey(key_id, key, _hash(key))


def parse_keys(text: str, where: str) -> KeyFile:
    """Parses the content of the key file. Raises ConfigError with the file's name (`where`) and the mistake."""
    values = _parse_yaml(text, where)
    if values is None:  # it may be empty for a moment while it is written, which must not refuse every client
        raise ConfigError(f"{where} is empty; without any keys it must say `keys: {{}}`")
    try:
        return from_values(KeyFile, values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", field=error.field) from error


def find_key(keys: Mapping[str, KeyEntry], authorization: str | None, now_s: float) -> tuple[str, KeyEntry]:
    """Returns id and entry of the key in an Authorization header. Raises InvalidApiKey."""
    if not authorization:
        raise InvalidApiKey("an API key is needed: Authorization: Bearer ts-...", reason="missing")
    bearer = _SCHEME.fullmatch(authorization.strip())
    shown = _KEY.fullmatch(bearer[1]) if bearer else None
    if shown is None:
        raise InvalidApiKey("Authorization must be Bearer and an API key, ts-...", reason="malformed")
    entry = keys.get(shown[1])
    is_right = hmac.compare_digest(_hash(shown[0]), _NOBODYS_HASH if entry is None else entry.sha256)
    if entry is None or not is_right:
        raise InvalidApiKey("incorrect API key", reason="wrong")
    # From here on the client has the secret, and may be told why its key is refused.
    if entry.disabled:
        raise InvalidApiKey(f"the API key {shown[1]} is revoked", reason="revoked")
    expires_s = entry.expires_s()
    if expires_s is not None and now_s >= expires_s:
        raise InvalidApiKey(f"the API key {shown[1]} expired at {entry.expires}", reason="expired")
    return shown[1], entry


def operator_key(cluster_token: str) -> str:
    """Returns the operator's key. All routers of a cluster have the same one, and it changes with the cluster's token.

    It gives access to all that the console can do. It does not open the ports of workers or the supervisor.
    """
    digest = hashlib.blake2b(cluster_token.encode(), digest_size=32, person=b"operator's key")
    return OPERATOR_PREFIX + digest.hexdigest()


class OperatorKey:
    """Recognises the operator's key in an Authorization header. A cluster without a token has none."""

    def __init__(self, cluster_token: str) -> None:
        self._expected = f"Bearer {operator_key(cluster_token)}".encode() if cluster_token else b""

    def is_in(self, authorization: str) -> bool:
        return bool(self._expected) and hmac.compare_digest(authorization.encode(), self._expected)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class _StrictLoader(yaml.SafeLoader):
    """Reads YAML strictly: a duplicate key is an error, and a date is a string."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable) or key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _parse_yaml(text: str, where: str) -> Any:
    """Returns the YAML value. Raises ConfigError with `where` and the line."""
    try:
        return yaml.load(text, _StrictLoader)  # a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{where}{line}: {problem}") from error
