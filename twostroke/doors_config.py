"""What a router's doors let in: ports apart from the clients', API keys, sizes. No torch and no ray here."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from twostroke.errors import ConfigError

MAX_AGE_S = 1_000_000
"""gRPC counts milliseconds in 31 bits."""
ORIGINS, HOSTS = "--cors-origin", "--allowed-host"


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorsConfig:
    admin_port: int = 0
    """gRPC for operators, other routers and probes: health to everybody, all else for the cluster's token. 0: any."""
    metrics_port: int | None = None
    """HTTP: /metrics and health. 0: any. None: clients' HTTP port has them too, unless clients need keys."""
    metrics_host: str | None = None
    """Interface of `metrics_port`. None: the one that clients connect to."""
    api_keys: str | None = None
    """File with the keys that clients need (router.frontend.auth.api_keys). None: everybody may come in."""
    max_request_bytes: int = 8 << 20
    """Of one gRPC message or HTTP body."""
    max_connections: int = 4096
    """One more, and the one that has waited longest without a request is closed; over gRPC first of those over which
    nobody was let in."""
    max_connection_age_s: float = 600.0
    """After which gRPC clients are told to connect again, wherever their name leads then; their streams go on."""
    cors_origins: tuple[str, ...] = ()
    """Origins (scheme://host[:port]) whose web pages may call this router from a browser, without credentials; `*` is
    every origin. Empty: no CORS headers."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, beside those of loopback, that a Host header may have on a loopback bind without API keys, or `*`. Where
    some are given, every other name is refused on any bind."""

    @property
    def own_metrics_port(self) -> int | None:
        """What is said there is not for clients that have a key."""
        return 0 if self.metrics_port is None and self.api_keys is not None else self.metrics_port

    def __post_init__(self) -> None:
        for name, port in (("--admin-port", self.admin_port), ("--metrics-port", self.metrics_port or 0)):
            if not 0 <= port < 1 << 16:
                raise ConfigError(f"{name} must be from 0 to 65535, got {port}", field=name)
        if self.metrics_host is not None and self.metrics_port is None:
            raise ConfigError("--metrics-host needs --metrics-port", field="--metrics-host")
        for name, value in (
            ("--max-request-bytes", self.max_request_bytes),
            ("--max-connections", self.max_connections),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be 1 or more, got {value}", field=name)
        for origin in self.cors_origins:
            _check_origin(origin)
        for name in self.allowed_hosts:
            if not name or (name != "*" and _host_of(name) != name.lower()):
                raise ConfigError(f"--allowed-host must be a name or address without a port, got {name!r}", field=HOSTS)
        if not 1 <= self.max_connection_age_s <= MAX_AGE_S:
            raise ConfigError(
                f"--max-connection-age must be seconds from 1 to {MAX_AGE_S}, got {self.max_connection_age_s:g}",
                field="--max-connection-age",
            )


def _check_origin(origin: str) -> None:
    """Browsers send an origin in lower case, without a path and without a scheme's own port."""
    scheme, _, rest = origin.partition("://")
    if origin != "*" and not (scheme in ("http", "https") and rest and _authority_of(rest) == rest):
        raise ConfigError(f"--cors-origin must be * or like https://app.example.com, got {origin!r}", field=ORIGINS)


def _authority_of(text: str) -> str | None:
    try:
        parsed = urlsplit(f"//{text}")
        host, port = parsed.hostname, parsed.port
    except ValueError:
        return None
    if not host:
        return None
    shown = f"[{host}]" if ":" in host else host
    return shown if port is None else f"{shown}:{port}"


def _host_of(text: str) -> str | None:
    authority = _authority_of(f"[{text}]" if ":" in text else text)
    return None if authority is None else authority.removeprefix("[").removesuffix("]")
