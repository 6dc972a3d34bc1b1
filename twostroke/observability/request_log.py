"""Defines the lines of a request log, which a router writes for every choice and, every five seconds, for every worker.

Each line is one JSON object, one of the two records here. From block hashes a reader learns only which prompts share a
prefix. `tools.simulate` replays a log as a trace and fits a simulated fleet to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

LOGGED_HASH_BYTES = 8
"""Bytes of a block hash that are logged: enough to distinguish the blocks of one log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRecord:
    """One choice of one request, written when it has ended."""

    record: str = "answer"
    request_id: str
    """The request's id, "#", and the number of the choice."""
    arrival_s: float
    """Unix time of arrival."""
    outcome: str
    """"stop", "length", "cancelled", or the name of an error's class."""
    prompt_tokens: int
    output_tokens: int
    """Tokens passed on, also if an error followed."""
    block_size: int
    blocks: str
    """The first 8 bytes of the hash of each full block of the prompt, in hex, end to end."""
    tenant: str = ""
    priority: int = 0
    policy: str
    attempts: int
    """Attempts on decode workers. The placement below is the last one's."""
    decode: str | None = None
    source: str | None = None
    peer: str | None = None
    peer_blocks: int = 0
    forecast: dict[str, float] = field(default_factory=dict)
    """What the router expected (router.routing.policy.Forecast), in seconds, blocks and tokens."""
    price: dict[str, float] = field(default_factory=dict)
    """Terms of the placement's price in seconds (router.routing.policy.Breakdown); empty where the policy has none."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed for this answer. This, `predicted_cached_tokens` and `ttft_s` are of
    the first attempt that answered."""
    predicted_cached_tokens: int | None = None
    ttft_s: float | None = None
    """Seconds from the decision to the first token. None without a token or with several attempts."""
    predicted_ttft_s: float | None = None
    itl_mean_s: float | None = None
    """Mean seconds between tokens at the router. None below two tokens."""
    itl_max_s: float | None = None
    drafted_tokens: dict[str, int] = field(default_factory=dict)
    """Drafted tokens that were run, by drafter. These and `kept_tokens` are of the attempt that ended the answer."""
    kept_tokens: dict[str, int] = field(default_factory=dict)
    """Drafted tokens that the sampler drew too, by drafter."""
    instants: dict[str, float] = field(default_factory=dict)
    """Unix time of each instant (twostroke.base.lifetime.Instant)."""

    @property
    def block_hashes(self) -> tuple[int, ...]:
        """`blocks` as numbers."""
        digits = 2 * LOGGED_HASH_BYTES
        return tuple(int(self.blocks[start : start + digits], 16) for start in range(0, len(self.blocks), digits))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRecord:
    worker: str
    """The worker from which pages were read."""
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One worker as it last reported itself."""

    record: str = "worker"
    at_s: float
    worker: str
    role: str
    epoch: str
    status: str
    block_size: int
    page_bytes: int
    pages_total: int
    step_tokens: int
    """Most tokens in one step; 0 while unknown."""
    step_target_s: float
    """Seconds of a step in which streams run; 0 while unknown."""
    costs: dict[str, float] = field(default_factory=dict)
    """Coefficients of twostroke.scheduler.cost.StepCost, in seconds."""
    links: tuple[LinkRecord, ...] = ()
    tiers: dict[str, float] = field(default_factory=dict)
    """Seconds to load one page, by the tier from which it is loaded."""
    conversion_page_s: float = 0.0
    """Seconds to convert one page for workers of another form; 0 where none have one."""
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    queued_s: float = 0.0
    prefill_busy_s: float = 0.0
    """Seconds of steps spent on prompt tokens since this epoch began."""


Record = AnswerRecord | WorkerRecord


def line_of(record: Record) -> str:
    return json.dumps(asdict(record), separators=(",", ":")) + "\n"


def blocks_of(hashes: Iterable[bytes]) -> str:
    return b"".join(block_hash[:LOGGED_HASH_BYTES] for block_hash in hashes).hex()
