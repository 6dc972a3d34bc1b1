"""What routers do with requests, and with workers that are silent."""

from __future__ import annotations

from typing import Any

from twostroke.base.errors import ConfigError
from twostroke.config.settings import Settings, setting


class RoutingConfig(Settings):
    policy: str = setting("kv", help="how requests find their workers")
    seed: int | None = setting(
        None, help="seed of everything that a router draws", default_text="from the operating system"
    )
    """The seed decides ties, and seeds of requests that bring none. All routers of a cluster have the same. None: ties
    are drawn from the operating system, seeds follow from the cluster's token."""
    request_log: str | None = setting(
        None,
        is_path=True,
        unit="FILE",
        help="a line of JSON is appended for every answer: times, placement, predictions, block hashes, no text",
        default_text="none",
    )
    slo_ttft_s: float | None = setting(
        None,
        above=0,
        help="refuse requests (429 with Retry-After) whose first token is predicted later than this; for prompts that "
        "would miss it, streams slow down to --slo-itl or --step-target-ms",
        default_text="none",
    )
    max_queued_requests: int = setting(10_000, least=1, help="most requests that wait in a router; one more is refused")
    """10 000 are some ten megabytes of token ids, and hours of work for most fleets."""
    public_prefixes: tuple[str, ...] = setting(
        (),
        flag="--public-prefix",
        is_path=True,
        unit="FILE",
        help='a prefix of prompts that tenants may share: text, or FILE.json with {"messages": [...]}; may be given '
        "several times",
        default_text="tenants share nothing",
    )


class PatienceConfig(Settings):
    """Time in which the listener was late itself does not count as silence."""

    heartbeat_s: float = setting(0.5, is_hidden=True, above=0, help="longest silence of a process that is well")
    suspect_after_s: float = setting(1.0, above=0, help="a worker that is silent for this long gets no new work")
    dead_after_s: float = setting(
        2.0, above=0, help="requests of a worker that is silent for this long continue elsewhere"
    )

    def model_post_init(self, _context: Any) -> None:
        if self.suspect_after_s <= self.heartbeat_s:
            raise ConfigError(
                f"--suspect-after ({self.suspect_after_s:g}) must be more than the {self.heartbeat_s:g} s between two "
                "heartbeats",
                field="--suspect-after",
            )
        if self.dead_after_s <= self.suspect_after_s:
            raise ConfigError(
                f"--dead-after ({self.dead_after_s:g}) must be more than --suspect-after ({self.suspect_after_s:g})",
                field="--dead-after",
            )
