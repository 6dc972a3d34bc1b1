"""The flags that all of `simulate` shares: which requests, which fleet, where results go."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from cluster.flags.checks import field_of
from tools.output import ReportFiles
from tools.simulate.fleet.shape import DraftShape, Faults, FleetShape, TierShape
from tools.simulate.fleet.simulation import check_span
from tools.simulate.traces.trace import Replay, Trace, read_trace, replayed
from tools.simulate.traces.workloads import generated
from twostroke.base.errors import ConfigError
from twostroke.base.json_values import from_values
from twostroke.config import CacheConfig
from twostroke.config.settings import Settings, group, setting, setting_of

DEFAULT_REQUESTS = 2000
"""Requests taken of a workload that never ends."""
GIGABYTE = 1e9


class RequestSource(Settings):
    """The origin of requests: a trace, or a workload by name."""

    trace: str | None = setting(None, unit="FILE", help="Mooncake's JSON lines, Azure's CSV, a request log")
    workload: str | None = setting(None, unit="NAME", help="generated: conversation, prefix-groups, code-agent")
    rate: float = setting(3.4, above=0, unit="PER_SECOND", help="requests per second of a workload")
    limit: int | None = setting(None, least=1, help="only the first N requests")
    jitter_s: float = setting(0.0, least=0, zero="raw bursts", help="delay each request by up to this")
    length_scale: float = setting(1.0, above=0, unit="FACTOR", help="shrink prompts and answers alike")
    seed: int = setting(0, help="seed of all draws")

    def model_post_init(self, _context: Any) -> None:
        if (self.trace is None) == (self.workload is None):
            raise ConfigError("one of --trace FILE and --workload NAME is needed", field="trace")

    def read(self) -> Trace:
        """Reads a trace: in order, from 0 s on, at the recorded pace."""
        if self.workload is not None:
            trace = generated(self.workload, self.limit or DEFAULT_REQUESTS, self.rate, self.seed)
        else:
            trace = read_trace(Path(self.trace or ""), self.limit)
        if trace.block_tokens * self.length_scale < 1:
            raise ConfigError(
                f"--length-scale {self.length_scale:g} leaves less than a token of a block of {trace.block_tokens}",
                field="length_scale",
            )
        replay = Replay(jitter_s=self.jitter_s, length_scale=self.length_scale, seed=self.seed)
        trace = replayed(trace, replay)
        check_span(trace)
        return trace

    @property
    def label(self) -> str:
        name = self.workload or Path(self.trace or "").name
        jitter = f", jitter {self.jitter_s:g} s" if self.jitter_s else ", raw bursts" if self.trace is not None else ""
        return name + jitter + (f", first {self.limit}" if self.limit else "")


class FleetFlags(Settings):
    """The settings of the fleet; the rest is as in the profile, or as in `FleetShape`."""

    profile: str | None = setting(None, unit="FILE", help="measured costs, links and delays, made by --fit")
    prefill: int | None = setting(None, help="prefill workers")
    decode: int | None = setting(None, help="decode workers")
    pool_tokens: int | None = setting(None, help="tokens that fit into a prefill worker's pages")
    decode_pool_tokens: int | None = setting(None, help="tokens that fit into a decode worker's pages")
    routers: int | None = setting(None, help="router replicas, which share their reservations")
    event_delay_s: float | None = setting(None, least=0, help="time until a router hears of a worker's events")
    event_faults: float | None = setting(
        None, unit="SHARE", help="share of events that are dropped; as many are doubled, and reordered"
    )
    noise: float | None = setting(None, unit="SIGMA", help="log-normal noise of every step's length")
    acceptance: str | None = setting(
        None,
        unit="P[,P]",
        help="decode workers draft tokens: chance of the first of a draft, the second..., that it is right if those "
        "before it are; the last holds for all others",
    )
    draft_share: float | None = setting(
        None, unit="SHARE", help="share of a stream's steps for which anything is drafted", default_text="1"
    )
    host_cache_bytes: int | None = setting_of(CacheConfig, "host_cache_bytes", default=None, zero=None)
    disk_cache_bytes: int | None = setting_of(CacheConfig, "disk_cache_bytes", default=None, zero=None)
    host_page_s: float | None = setting(
        None, flag="--host-page-s", above=0, unit="SECONDS", help="time to load one page from host memory"
    )
    disk_page_s: float | None = setting(
        None, flag="--disk-page-s", above=0, unit="SECONDS", help="time to load one page from disk"
    )

    def model_post_init(self, _context: Any) -> None:
        if self.event_faults is not None and not 0 <= self.event_faults < 1:
            raise ConfigError(
                f"--event-faults must be a share from 0 to below 1, got {self.event_faults:g}", field="event_faults"
            )

    def shape(self, block_tokens: int, seed: int) -> FleetShape:
        """Returns a fleet with pages of the trace's blocks: as many bytes, as many tokens. Raises ConfigError."""
        for flag, value in (("--pool-tokens", self.pool_tokens), ("--decode-pool-tokens", self.decode_pool_tokens)):
            if value is not None and value < block_tokens:
                raise ConfigError(
                    f"{flag} {value} does not hold one block of {block_tokens} tokens", field=field_of(flag)
                )
        shape = with_blocks_of(FleetShape() if self.profile is None else read_profile(Path(self.profile)), block_tokens)
        if self.event_delay_s is not None:
            shape = dataclasses.replace(shape, delays=dataclasses.replace(shape.delays, event_s=self.event_delay_s))
        if (share := self.event_faults) is not None:
            faults = Faults(event_drop=share, event_duplicate=share, event_reorder=share)
            shape = dataclasses.replace(shape, faults=faults)
        given: dict[str, Any] = {
            "prefill": self.prefill,
            "decode": self.decode,
            "prefill_pages": None if self.pool_tokens is None else self.pool_tokens // block_tokens,
            "decode_pages": None if self.decode_pool_tokens is None else self.decode_pool_tokens // block_tokens,
            "routers": self.routers,
            "noise": self.noise,
            "seed": seed,
            "tiers": self._tiers(shape.tiers),
            "drafts": self._drafts(shape.drafts),
        }
        return dataclasses.replace(shape, **{name: value for name, value in given.items() if value is not None})

    def _drafts(self, drafts: DraftShape | None) -> DraftShape | None:
        """Returns the profile's drafts with what the flags say of them."""
        if self.acceptance is None:
            if self.draft_share is not None:
                raise ConfigError("--draft-share needs --acceptance: how often are drafts right?", field="acceptance")
            return drafts
        chances = numbers("--acceptance", self.acceptance)
        share = 1.0 if self.draft_share is None else self.draft_share
        for flag, values in (("--acceptance", chances), ("--draft-share", (share,))):
            if not values or any(not 0 <= value <= 1 for value in values):
                raise ConfigError(f"{flag} must be from 0 to 1, got {list(values)}", field=field_of(flag))
        return DraftShape.of_chances(chances, share)

    def _tiers(self, tiers: TierShape) -> TierShape:
        """Returns the profile's tiers with what the flags say of them."""
        given: dict[str, Any] = {
            "host_bytes": self.host_cache_bytes,
            "disk_bytes": self.disk_cache_bytes,
            "host_page_s": self.host_page_s,
            "disk_page_s": self.disk_page_s,
        }
        # A page time that is given is that of all workers.
        tiers = dataclasses.replace(
            tiers,
            prefill_host_page_s=None if self.host_page_s else tiers.prefill_host_page_s,
            prefill_disk_page_s=None if self.disk_page_s else tiers.prefill_disk_page_s,
        )
        return dataclasses.replace(tiers, **{name: value for name, value in given.items() if value is not None})


class LinkedFleetFlags(FleetFlags):
    """Flags of a simulated fleet, with those of the network between its workers."""

    bandwidth: float | None = setting(None, above=0, unit="GB/S", help="of each worker's network, in and out")

    def shape(self, block_tokens: int, seed: int) -> FleetShape:
        shape = super().shape(block_tokens, seed)
        if self.bandwidth is None:
            return shape
        return dataclasses.replace(shape, link_bytes_per_s=self.bandwidth * GIGABYTE)


class FleetQuestion(Settings):
    """What every question about a fleet needs."""

    source: RequestSource = group(RequestSource, "requests", "which requests")
    fleet: LinkedFleetFlags = group(LinkedFleetFlags, "fleet", "which fleet")

    def read(self) -> tuple[Trace, FleetShape]:
        """Returns the requests, and the fleet that has their blocks."""
        trace = self.source.read()
        return trace, self.fleet.shape(trace.block_tokens, self.source.seed)


class Output(ReportFiles):
    """The files that results go to, and how many runs there are at a time."""

    jobs: int | None = setting(None, least=1, default_text="one for each core", help="runs at a time")

    @property
    def processes(self) -> int:
        return self.jobs or len(os.sched_getaffinity(0))


class Promise(Settings):
    """What is promised to every request."""

    slo_ttft_s: float = setting(..., help="the first token within this")
    slo_itl_s: float = setting(..., help="on average this between tokens")


def numbers(flag: str, text: str | None) -> tuple[float, ...]:
    """Returns the numbers of a list with commas; none by default."""
    try:
        values = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        values = (math.nan,)
    if not all(map(math.isfinite, values)):
        raise ConfigError(f"{flag} must be numbers separated by commas, got {text!r}", field=field_of(flag))
    return values


def with_blocks_of(shape: FleetShape, block_tokens: int) -> FleetShape:
    scale = block_tokens / shape.block_size
    return dataclasses.replace(
        shape,
        tiers=shape.tiers.scaled(scale),
        block_size=block_tokens,
        prefill_pages=max(1, round(shape.prefill_pages / scale)),
        decode_pages=max(1, round(shape.decode_pages / scale)),
        page_bytes=max(1, round(shape.page_bytes * scale)),
        prefill_page_bytes=shape.prefill_page_bytes and max(1, round(shape.prefill_page_bytes * scale)),
        conversion_page_s=shape.conversion_page_s * scale,
    )


def profile_text(shape: FleetShape) -> str:
    return json.dumps(dataclasses.asdict(shape), indent=2) + "\n"


def read_profile(path: Path) -> FleetShape:
    try:
        return from_values(FleetShape, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--profile {path}: {error.strerror}", field="profile") from error
    except ValueError as error:
        raise ConfigError(f"--profile {path}: not a JSON file: {error}", field="profile") from error
    except ConfigError as error:
        raise ConfigError(f"--profile {path}: {error.message}", field=error.field) from error
