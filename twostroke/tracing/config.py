"""Where traces go."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from twostroke.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    otlp_endpoint: str | None = None
    """http://HOST:PORT (or https://) of an OTLP/gRPC collector. None: spans stay in the processes that made them."""
    ratio: float = 1.0
    """Share of traces that are sent there, of requests that do not say themselves whether theirs is sampled."""

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ConfigError(f"--trace-ratio must be from 0 to 1, got {self.ratio:g}", field="trace_ratio")
        if self.otlp_endpoint is not None and not _is_endpoint(self.otlp_endpoint):
            raise ConfigError(
                f"--otlp-endpoint must be http://HOST:PORT or https://HOST:PORT, got {self.otlp_endpoint!r}",
                field="otlp_endpoint",
            )


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:  # a port that is no number
        return False
