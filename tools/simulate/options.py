"""The flags that all of `simulate` shares: which requests, which fleet, where results go."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.flags.checks import at_least_zero, field_of, file_can_be_made, positive
from tools.simulate.fleet.shape import Faults, FleetShape
from tools.simulate.fleet.simulation import check_span
from tools.simulate.traces.trace import Replay, Trace, read_trace, replayed
from tools.simulate.traces.workloads import generated
from twostroke.errors import ConfigError
from twostroke.json_values import from_values

DEFAULT_REQUESTS = 2000
"""Requests taken of a workload that never ends."""
DEFAULT_RATE = 3.4
"""Requests per second of a workload; a trace has its own."""
GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSource:
    """The origin of requests: a trace, or a workload by name."""

    trace: Path | None
    workload: str | None
    rate: float
    limit: int | None
    jitter_s: float
    length_scale: float
    seed: int

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.workload is None):
            raise ConfigError("one of --trace FILE and --workload NAME is needed", field="trace")
        positive("--rate", self.rate)
        positive("--limit", self.limit)
        positive("--length-scale", self.length_scale)
        at_least_zero("--jitter", self.jitter_s)

    def read(self) -> Trace:
        """In order, from 0 s on, at the recorded pace."""
        if self.workload is not None:
            trace = generated(self.workload, self.limit or DEFAULT_REQUESTS, self.rate, self.seed)
        else:
            assert self.trace is not None
            trace = read_trace(self.trace, self.limit)
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
        name = self.workload or (self.trace.name if self.trace is not None else "")
        jitter = f", jitter {self.jitter_s:g} s" if self.jitter_s else ", raw bursts" if self.trace is not None else ""
        return name + jitter + (f", first {self.limit}" if self.limit else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    json_path: str | None
    html_path: str | None
    jobs: int

    def __post_init__(self) -> None:
        file_can_be_made("--json", self.json_path)
        file_can_be_made("--html", self.html_path)
        positive("--jobs", self.jobs)


def add_source(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("which requests")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's JSON lines, Azure's CSV, a request log")
    source.add_argument("--workload", metavar="NAME", help="generated: conversation, prefix-groups, code-agent")
    group.add_argument("--rate", type=float, default=DEFAULT_RATE, help="of a workload, in requests/s (%(default)s)")
    group.add_argument("--limit", type=int, metavar="N", help="the first N requests")
    group.add_argument(
        "--jitter",
        type=float,
        metavar="S",
        default=0.0,
        help="delay each by up to S seconds (default: raw bursts)",
    )
    group.add_argument("--length-scale", type=float, default=1.0, metavar="X", help="of prompts and answers alike")
    group.add_argument("--seed", type=int, default=0, help="of all draws (default: %(default)s)")


def add_fleet(parser: argparse.ArgumentParser, *, has_bandwidth: bool = True) -> None:
    """Whatever is not said is as in --profile, or as in `FleetShape`."""
    group = parser.add_argument_group("which fleet")
    group.add_argument("--profile", type=Path, metavar="FILE", help="measured costs, links and delays, made by --fit")
    group.add_argument("--prefill", type=int, metavar="N", help="prefill workers")
    group.add_argument("--decode", type=int, metavar="N", help="decode workers")
    group.add_argument("--pool-tokens", type=int, metavar="N", help="that fit into a prefill worker's pages")
    group.add_argument("--decode-pool-tokens", type=int, metavar="N", help="that fit into a decode worker's pages")
    if has_bandwidth:
        group.add_argument("--bandwidth", type=float, metavar="GB/S", help="of each worker's network, in and out")
    else:
        parser.set_defaults(bandwidth=None)
    group.add_argument("--routers", type=int, metavar="N", help="replicas, which share their reservations")
    group.add_argument("--event-delay", type=float, metavar="S", help="until a router hears of a worker's events")
    group.add_argument(
        "--event-faults", type=float, metavar="SHARE", help="of events, each: dropped, doubled, reordered"
    )
    group.add_argument("--noise", type=float, metavar="SIGMA", help="log-normal, of every step's length")


def add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    add_json(group)
    group.add_argument("--html", metavar="FILE", help="also as a page with figures")
    group.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: %(default)s)")


def add_json(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", metavar="FILE", help='also as JSON; "-" for standard output')


def source_from(args: argparse.Namespace) -> RequestSource:
    return RequestSource(
        trace=args.trace,
        workload=args.workload,
        rate=args.rate,
        limit=args.limit,
        jitter_s=args.jitter,
        length_scale=args.length_scale,
        seed=args.seed,
    )


def output_from(args: argparse.Namespace) -> Output:
    return Output(json_path=args.json, html_path=args.html, jobs=args.jobs)


def fleet_from(args: argparse.Namespace, block_tokens: int) -> FleetShape:
    """With pages of the trace's blocks, whatever the profile's were: as many bytes, as many tokens."""
    for flag, value in (("--pool-tokens", args.pool_tokens), ("--decode-pool-tokens", args.decode_pool_tokens)):
        if value is not None and value < block_tokens:
            raise ConfigError(f"{flag} {value} does not hold one block of {block_tokens} tokens", field=field_of(flag))
    positive("--bandwidth", args.bandwidth)
    shape = FleetShape() if args.profile is None else read_profile(args.profile)
    shape = with_blocks_of(shape, block_tokens)
    said = {
        "prefill": args.prefill,
        "decode": args.decode,
        "prefill_pages": None if args.pool_tokens is None else args.pool_tokens // block_tokens,
        "decode_pages": None if args.decode_pool_tokens is None else args.decode_pool_tokens // block_tokens,
        "link_bytes_per_s": None if args.bandwidth is None else args.bandwidth * GIGABYTE,
        "routers": args.routers,
        "noise": args.noise,
        "seed": args.seed,
    }
    shape = dataclasses.replace(shape, **{name: value for name, value in said.items() if value is not None})
    return _with_events(shape, args.event_delay, args.event_faults)


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """Return the numbers of a list with commas; none where nothing is said."""
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
        block_size=block_tokens,
        prefill_pages=max(1, round(shape.prefill_pages / scale)),
        decode_pages=max(1, round(shape.decode_pages / scale)),
        page_bytes=max(1, round(shape.page_bytes * scale)),
    )


def _with_events(shape: FleetShape, delay_s: float | None, faults: float | None) -> FleetShape:
    if delay_s is not None:
        at_least_zero("--event-delay", delay_s)
        shape = dataclasses.replace(shape, delays=dataclasses.replace(shape.delays, event_s=delay_s))
    if faults is not None:
        if not 0 <= faults < 1:
            raise ConfigError(f"--event-faults must be a share from 0 to below 1, got {faults:g}", field="event_faults")
        shape = dataclasses.replace(
            shape, faults=Faults(event_drop=faults, event_duplicate=faults, event_reorder=faults)
        )
    return shape


def profile_text(shape: FleetShape) -> str:
    return json.dumps(asdict(shape), indent=2) + "\n"


def read_profile(path: Path) -> FleetShape:
    try:
        return from_values(FleetShape, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--profile {path}: {error.strerror}", field="profile") from error
    except ValueError as error:
        raise ConfigError(f"--profile {path}: not a JSON file: {error}", field="profile") from error
    except ConfigError as error:
        raise ConfigError(f"--profile {path}: {error.message}", field=error.field) from error
