"""What a router's doors let in: ports apart from the clients', API keys, sizes. No torch and no ray here."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.errors import ConfigError

MAX_AGE_S = 1_000_000
"""gRPC counts milliseconds in 31 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorsConfig:
    admin_port: int = 0
    """gRPC for operators, other routers and probes: health to everybody, all else for the cluster's token. 0: any."""
    metrics_port: int | None = None
    """HTTP: /metrics and health. 0: any. None: clients' HTTP port has them too, unless clients need keys."""
    metrics_host: str | None = None
    """Interface of `metrics_port`. None: the one that clients connect to."""
    api_keys: str | None = None
    """File with the keys that clients need (router.api_keys). None: everybody may come in."""
    max_request_bytes: int = 8 << 20
    """Of one gRPC message or HTTP body."""
    max_connections: int = 4096
    """Over HTTP: one more, and the one that has waited longest without a request is closed. Over gRPC: one more is
    refused."""
    max_connection_age_s: float = 600.0
    """After which gRPC clients are told to connect again, wherever their name leads then; their streams go on."""

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
        if not 1 <= self.max_connection_age_s <= MAX_AGE_S:
            raise ConfigError(
                f"--max-connection-age must be seconds from 1 to {MAX_AGE_S}, got {self.max_connection_age_s:g}",
                field="--max-connection-age",
            )
