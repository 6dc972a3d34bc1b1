"""`twostroke simulate`: policies against the same requests, at one pace or several; what they came to."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from cluster.flags.checks import positive
from cluster.scaling.capacity import LatencyTargets
from tools.output import write_json, write_text
from tools.simulate.demand import check_objectives
from tools.simulate.fitting import SINCE_DECISION, likeness, likeness_json, policies_of, print_likeness, real_answers
from tools.simulate.fleet.results import SimulatedRun
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.loads import FoundRate, highest_rates, pace_at
from tools.simulate.options import Output, RequestSource, fleet_from, numbers, output_from, source_from
from tools.simulate.page import Found, render_page
from tools.simulate.report import (
    as_json,
    console_for,
    explanation,
    notes_of,
    print_rates,
    print_summaries,
)
from tools.simulate.runs import Runner, Trial, runner
from tools.simulate.summary import Summary, oracle_rate_of, summarise, with_ratios
from tools.simulate.traces.trace import Trace
from tools.simulate.variants import BASELINE, DEFAULT, check_variant, variants_from, with_baseline
from twostroke.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    source: RequestSource
    output: Output
    variants: tuple[str, ...]
    """Round-robin first."""
    rate_scales: tuple[float, ...]
    utilisations: tuple[float, ...]
    """Instead of scales."""
    of: str
    """The policy whose utilisation is meant."""
    peer_pulls: bool
    promise: LatencyTargets
    admits: bool
    """Routers refuse what would miss the objective."""
    find_rate_s: float | None
    precision: float

    def __post_init__(self) -> None:
        for value in self.rate_scales:
            positive("--rate-scale", value)
        for value in self.utilisations:
            positive("--utilisation", value)
        positive("--find-rate", self.find_rate_s)
        positive("--precision", self.precision)
        if self.rate_scales and self.utilisations:
            raise ConfigError("--rate-scale and --utilisation exclude each other", field="utilisation")
        if self.admits and self.promise.ttft_s is None:
            raise ConfigError("--admission refuses by --slo-ttft: how many seconds?", field="slo_ttft")
        check_variant("--of", self.of)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is compared")
    group.add_argument("--policies", default=",".join(DEFAULT), help='names, or "all" (default: %(default)s)')
    group.add_argument("--rate-scale", default="", metavar="X[,X]", help="times the trace's own pace (default: 1)")
    group.add_argument(
        "--utilisation", default="", metavar="U[,U]", help="instead: at which --of keeps prefill workers that busy"
    )
    group.add_argument("--of", default=BASELINE, metavar="POLICY", help="default: %(default)s")
    group.add_argument("--peer-pulls", action=argparse.BooleanOptionalAction, default=True, help="default: yes")
    group.add_argument("--slo-ttft", type=float, metavar="S", help="for goodput: the first token within S seconds")
    group.add_argument("--slo-itl", type=float, metavar="S", help="for goodput: on average S seconds between tokens")
    group.add_argument("--admission", action="store_true", help="routers refuse what would miss --slo-ttft")
    group.add_argument("--find-rate", type=float, metavar="S", help="the highest rate with a p90 TTFT up to S seconds")
    group.add_argument("--precision", type=float, default=0.04, help="of --find-rate, relative (default: %(default)s)")


def options_from(args: argparse.Namespace) -> SimulateOptions:
    return SimulateOptions(
        source=source_from(args),
        output=output_from(args),
        variants=with_baseline(variants_from(args.policies)),
        rate_scales=numbers("--rate-scale", args.rate_scale),
        utilisations=numbers("--utilisation", args.utilisation),
        of=args.of,
        peer_pulls=args.peer_pulls,
        promise=LatencyTargets(ttft_s=args.slo_ttft, itl_s=args.slo_itl),
        admits=args.admission,
        find_rate_s=args.find_rate,
        precision=args.precision,
    )


def run_session(args: argparse.Namespace) -> int:
    options = options_from(args)
    trace = options.source.read()
    shape = fleet_from(args, trace.block_tokens)
    _check(options, trace, shape)
    if options.admits:
        shape = dataclasses.replace(shape, slo_ttft_s=options.promise.ttft_s)
    console = console_for(options.output.json_path)
    console.print(_heading(options, trace, shape), markup=False)
    run_all = runner(options.output.jobs)
    real = real_answers(options.source.trace, options.source.limit)
    options = dataclasses.replace(options, variants=tuple(dict.fromkeys((*options.variants, *policies_of(real)))))
    found = _rates(options, trace, shape, run_all)
    oracle_rate = oracle_rate_of(trace, shape)
    compared = _compare(options, trace, shape, run_all, holds=bool(real)) if options.find_rate_s is None else []
    summaries = with_ratios([summarise(run, scale, options.promise, oracle_rate) for scale, run in compared])
    facts = _facts(options, shape, oracle_rate)
    _print(options, summaries, found, oracle_rate, console)
    alike = [likeness(real, run) for scale, run in compared if scale == 1.0 and run.policy in policies_of(real)]
    if alike:
        print_likeness(alike, SINCE_DECISION, console)
    write_json({**as_json(summaries, found, facts), "replay": likeness_json(alike)}, options.output.json_path)
    if options.output.html_path is not None:
        page = Found(summaries=tuple(summaries), runs=tuple(compared), rates=tuple(found), oracle_rate=oracle_rate)
        write_text(render_page(page, _heading(options, trace, shape), options.promise), options.output.html_path)
    return 0


def _check(options: SimulateOptions, trace: Trace, shape: FleetShape) -> None:
    """Before minutes of simulating, not after."""
    check_objectives(trace, shape, options.promise)
    if options.find_rate_s is not None:
        check_objectives(trace, shape, LatencyTargets(ttft_s=options.find_rate_s, itl_s=None), "--find-rate")


def _compare(
    options: SimulateOptions, trace: Trace, shape: FleetShape, run_all: Runner, *, holds: bool
) -> list[tuple[float, SimulatedRun]]:
    """`holds`: requests wait in routers, as those of the live router did whose log this is."""
    scales = options.rate_scales or (1.0,)
    if options.utilisations:
        meant = Trial(variant=options.of, trace=trace, shape=shape, peer_pulls=options.peer_pulls)
        scales = tuple(pace_at(utilisation, meant, run_all) for utilisation in options.utilisations)
    trials = [
        Trial(variant=variant, trace=trace, shape=shape, rate_scale=scale, peer_pulls=options.peer_pulls, holds=holds)
        for scale in scales
        for variant in options.variants
    ]
    return [(trial.rate_scale, run) for trial, run in zip(trials, run_all(trials), strict=True)]


def _rates(options: SimulateOptions, trace: Trace, shape: FleetShape, run_all: Runner) -> list[FoundRate]:
    if options.find_rate_s is None:
        return []
    trials = [
        Trial(variant=variant, trace=trace, shape=shape, peer_pulls=options.peer_pulls) for variant in options.variants
    ]
    return highest_rates(trials, options.find_rate_s, options.precision, run_all)


def _heading(options: SimulateOptions, trace: Trace, shape: FleetShape) -> str:
    pulls = "peers are pulled from" if options.peer_pulls else "no pulls from peers"
    routers = f"{shape.routers} router{'s' if shape.routers > 1 else ''}"
    return (
        f"{options.source.label}: {len(trace.rows)} requests; {shape.prefill} prefill workers of "
        f"{shape.prefill_pages * shape.block_size:,} tokens, {shape.decode} decode workers of "
        f"{shape.decode_pool_tokens:,}; {shape.link_bytes_per_s / 1e9:g} GB/s; {routers}; {pulls}; "
        f"seed {options.source.seed}"
    )


def _facts(options: SimulateOptions, shape: FleetShape, oracle_rate: float) -> dict[str, Any]:
    source = dataclasses.asdict(options.source)
    source["trace"] = None if options.source.trace is None else str(options.source.trace)
    return {
        "source": source,
        "fleet": dataclasses.asdict(shape),
        "promise": dataclasses.asdict(options.promise),
        "peer_pulls": options.peer_pulls,
        "oracle_hit_rate": oracle_rate,
    }


def _print(
    options: SimulateOptions,
    summaries: Sequence[Summary],
    found: Sequence[FoundRate],
    oracle_rate: float,
    console: Console,
) -> None:
    print_summaries(summaries, console)
    if summaries:
        console.print(f"[dim]{explanation(options.promise, oracle_rate)}[/dim]")
    if options.find_rate_s is not None:
        print_rates(found, options.find_rate_s, console)
    for note in notes_of(summaries):
        console.print(f"note: {note}", markup=False)
