"""Settings of traces: the collector that gets them, and how many of them."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from twostroke.base.errors import ConfigError
from twostroke.config.settings import Settings, setting


class TracingConfig(Settings):
    otlp_endpoint: str | None = setting(
        None,
        unit="URL",
        help="send spans of requests to this OpenTelemetry collector over OTLP/gRPC, as http://HOST:4317",
        default_text="keep those of the latest requests, for `twostroke trace`",
    )
    ratio: float = setting(
        1.0,
        flag="--trace-ratio",
        must="from 0 to 1",
        least=0,
        most=1,
        unit="SHARE",
        help="share of traces that are sent, of requests whose clients do not say themselves whether theirs is",
    )

    def model_post_init(self, _context: Any) -> None:
        if self.otlp_endpoint is not None and not _is_endpoint(self.otlp_endpoint):
            raise ConfigError(
                f"--otlp-endpoint must be http://HOST:PORT or https://HOST:PORT, got {self.otlp_endpoint!r}",
                field="--otlp-endpoint",
            )


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:  # a port that is not a number
        return False
