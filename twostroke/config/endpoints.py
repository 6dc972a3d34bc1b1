"""Settings of a router's endpoints: ports, API keys, sizes, and the web pages that may call it."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from twostroke.base.errors import ConfigError
from twostroke.config.settings import Settings, port, setting

MAX_AGE_S = 1_000_000
"""Most seconds that a connection may last: gRPC counts milliseconds in 31 bits."""
ORIGINS, HOSTS = "--cors-origin", "--allowed-host"


class ListenConfig(Settings):
    host: str = setting("127.0.0.1", help="interface that clients connect to")
    http_port: int = port(8000, help="port of the OpenAI HTTP API")
    grpc_port: int = port(50051, help="port of the twostroke.v1 gRPC API")


class EndpointsConfig(Settings):
    admin_port: int = port(
        section="routers", help="port of gRPC health for probes, and of Control for who has the cluster's token"
    )
    """Health is for everybody there, all else for operators and other routers, who have the cluster's token."""
    metrics_port: int | None = port(
        None,
        section="routers",
        help="port of /metrics and health over HTTP, instead of --http-port",
        default_text="on --http-port; with several routers any free one",
    )
    """None: clients' HTTP port has them too, unless clients need keys."""
    metrics_host: str | None = setting(
        None, section="routers", unit="HOST", help="interface of --metrics-port", default_text="--host"
    )
    api_keys: str | None = setting(
        None,
        is_path=True,
        unit="FILE",
        help="clients need a key of this file (`twostroke keys add`), within its limits",
        default_text="anybody may come in",
    )
    max_request_bytes: int = setting(
        8 << 20, section="routers", least=1, unit="BYTES", help="largest HTTP body or gRPC message"
    )
    text_cache_bytes: int = setting(
        64 << 20,
        section="routers",
        least=0,
        unit="BYTES",
        help="what a router keeps of the tokens of earlier prompts, so that a chat's next turn costs "
        "what is new in it; hashes take up to a fifth more beside it; 0 keeps nothing",
    )
    max_connections: int = setting(
        4096,
        least=1,
        help="most connections over HTTP, and as many over gRPC; one more, and the one that has waited longest without "
        "a request is closed",
    )
    """Over gRPC, connections without an admitted client are closed first."""
    max_connection_age_s: float = setting(
        600.0,
        least=1,
        most=MAX_AGE_S,
        help="gRPC clients connect again after this long, wherever their name leads then; streams continue",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        flag=ORIGINS,
        section="routers",
        unit="ORIGIN",
        help="web pages of this origin (https://app.example.com, or *) may call from a browser, without credentials; "
        "any number of times",
        default_text="none",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        flag=HOSTS,
        section="routers",
        unit="NAME",
        help="a name by which clients or a reverse proxy may ask (Host header), or *; any number of times",
        default_text="on loopback without --api-keys the names of loopback, elsewhere any",
    )

    @property
    def own_metrics_port(self) -> int | None:
        """Clients that have a key may not read it."""
        return 0 if self.metrics_port is None and self.api_keys is not None else self.metrics_port

    def model_post_init(self, _context: Any) -> None:
        if self.metrics_host is not None and self.metrics_port is None:
            raise ConfigError("--metrics-host needs --metrics-port", field="--metrics-host")
        for origin in self.cors_origins:
            _check_origin(origin)
        for name in self.allowed_hosts:
            if not name or (name != "*" and _host_of(name) != name.lower()):
                raise ConfigError(f"--allowed-host must be a name or address without a port, got {name!r}", field=HOSTS)


def _check_origin(origin: str) -> None:
    """Browsers send an origin in lower case, without a path and without a scheme's own port."""
    scheme, _, rest = origin.partition("://")
    if origin != "*" and not (scheme in ("http", "https") and rest and _authority_of(rest) == rest):
        raise ConfigError(f"--cors-origin must be * or like https://app.example.com, got {origin!r}", field=ORIGINS)


def _authority_of(text: str) -> str | None:
    try:
        parsed = urlsplit(f"//{text}")
        host, port_number = parsed.hostname, parsed.port
    except ValueError:
        return None
    if not host:
        return None
    shown = f"[{host}]" if ":" in host else host
    return shown if port_number is None else f"{shown}:{port_number}"


def _host_of(text: str) -> str | None:
    authority = _authority_of(f"[{text}]" if ":" in text else text)
    return None if authority is None else authority.removeprefix("[").removesuffix("]")
