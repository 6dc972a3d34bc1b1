"""`twostroke simulate`: policies against the same requests, at one pace or several; what they came to."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from cluster.flags.checks import positive
from cluster.values.worker_counts import LatencyTargets
from tools.output import write_json, write_text
from tools.simulate.fit.likeness import (
    SINCE_DECISION,
    likeness,
    likeness_json,
    policies_of,
    print_likeness,
    real_answers,
)
from tools.simulate.fleet.results import SimulatedRun
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.loads import highest_rates, pace_at
from tools.simulate.options import FleetQuestion, Output, numbers
from tools.simulate.planning.demand import check_objectives
from tools.simulate.reports.page import ComparedRuns, render_page
from tools.simulate.reports.report import as_json, explanation, notes_of, print_summaries, rates_grid
from tools.simulate.reports.summary import oracle_rate_of, summarise, with_ratios
from tools.simulate.runs import Runner, Trial, runner
from tools.simulate.traces.trace import Trace
from tools.simulate.variants import BASELINE, DEFAULT, check_variant, variants_from
from tools.tables import console_for, table_of
from twostroke.base.errors import ConfigError
from twostroke.config import flags
from twostroke.config.settings import Settings, group, setting
from twostroke.kv_cache.tier import Tier


class ComparisonOptions(Settings):
    """What is compared."""

    policies: str = setting(",".join(DEFAULT), unit="NAMES", help='policies with commas between them, or "all"')
    rate_scale: str | None = setting(None, unit="X[,X]", default_text="1", help="times the trace's own pace")
    utilisation: str | None = setting(
        None, unit="U[,U]", help="instead: paces at which --of keeps prefill workers that busy"
    )
    of: str = setting(BASELINE, unit="POLICY", help="the policy whose utilisation is meant")
    peer_pulls: bool = setting(True, help="pull pages from peers")
    slo_ttft_s: float | None = setting(None, help="for goodput: the first token within this")
    slo_itl_s: float | None = setting(None, help="for goodput: on average this between tokens")
    admission: bool = setting(False, help="routers refuse what would miss --slo-ttft")
    find_rate_s: float | None = setting(None, above=0, help="find the highest rate with a p90 TTFT up to this")
    precision: float = setting(0.04, above=0, unit="FRACTION", help="of --find-rate, relative")

    def model_post_init(self, _context: Any) -> None:
        for flag, values in (("--rate-scale", self.rate_scales), ("--utilisation", self.utilisations)):
            for value in values:
                positive(flag, value)
        if self.rate_scales and self.utilisations:
            raise ConfigError("--rate-scale and --utilisation exclude each other", field="utilisation")
        if self.admission and self.promise.ttft_s is None:
            raise ConfigError("--admission refuses by --slo-ttft: how many seconds?", field="slo_ttft")
        check_variant("--of", self.of)

    @property
    def variants(self) -> tuple[str, ...]:
        """The policies, round-robin first: everything is relative to it."""
        return tuple(dict.fromkeys((BASELINE, *variants_from(self.policies))))

    @property
    def rate_scales(self) -> tuple[float, ...]:
        return numbers("--rate-scale", self.rate_scale)

    @property
    def utilisations(self) -> tuple[float, ...]:
        """Utilisations that say the pace, instead of scales."""
        return numbers("--utilisation", self.utilisation)

    @property
    def promise(self) -> LatencyTargets:
        return LatencyTargets(ttft_s=self.slo_ttft_s, itl_s=self.slo_itl_s)


class Calibration(Settings):
    """The profile of a real fleet."""

    fit: str | None = setting(
        None, unit="LOG", help="write --profile from the log of a router's --request-log, and no more"
    )
    steps: str | None = setting(
        None, unit="TRACE", help="for --fit: workers share cores; what `twostroke profile` wrote of them under load"
    )


class SimulateFlags(FleetQuestion):
    compared: ComparisonOptions = group(ComparisonOptions, "compared", "what is compared")
    calibration: Calibration = group(Calibration, "calibration")
    output: Output = group(Output, "output")


def run_session(args: argparse.Namespace) -> int:
    flags_given = flags.read(SimulateFlags, args)
    compared, output, promise = flags_given.compared, flags_given.output, flags_given.compared.promise
    variants = compared.variants
    trace, shape = flags_given.read()
    _check(compared, trace, shape)
    if compared.admission:
        shape = dataclasses.replace(shape, slo_ttft_s=promise.ttft_s)
    heading = _heading(flags_given, trace, shape)
    console = console_for(output.json_path)
    console.print(heading, markup=False)
    real = real_answers(flags_given.source.trace, flags_given.source.limit)
    trials = [
        Trial(variant=variant, trace=trace, shape=shape, peer_pulls=compared.peer_pulls)
        for variant in dict.fromkeys((*variants, *policies_of(real)))
    ]
    rates, runs, oracle_rate = [], [], oracle_rate_of(trace, shape)
    with runner(output.processes) as run_all:
        if compared.find_rate_s is not None:
            rates = highest_rates(trials, compared.find_rate_s, compared.precision, run_all)
        else:
            runs = _compare(compared, trials, run_all, holds=bool(real))
    summaries = with_ratios([summarise(run, scale, promise, oracle_rate) for scale, run in runs])
    shown = ComparedRuns(summaries=tuple(summaries), runs=tuple(runs), rates=tuple(rates), oracle_rate=oracle_rate)
    _print(compared, shown, console)
    alike = [likeness(real, run) for scale, run in runs if scale == 1.0 and run.policy in policies_of(real)]
    if alike:
        print_likeness(alike, SINCE_DECISION, console)
    facts = {
        "source": flags_given.source.model_dump(),
        "fleet": dataclasses.asdict(shape),
        "promise": dataclasses.asdict(promise),
        "peer_pulls": compared.peer_pulls,
        "oracle_hit_rate": oracle_rate,
    }
    write_json({**as_json(summaries, rates, facts), "replay": likeness_json(alike)}, output.json_path)
    if output.html_path is not None:
        write_text(render_page(shown, heading, promise), output.html_path)
    return 0


def _check(compared: ComparisonOptions, trace: Trace, shape: FleetShape) -> None:
    """Checks what is asked for before minutes of simulating, not after."""
    check_objectives(trace, shape, compared.promise)
    if compared.find_rate_s is not None:
        check_objectives(trace, shape, LatencyTargets(ttft_s=compared.find_rate_s, itl_s=None), "--find-rate")


def _compare(
    compared: ComparisonOptions, trials: Sequence[Trial], run_all: Runner, *, holds: bool
) -> list[tuple[float, SimulatedRun]]:
    """Compares the policies. `holds`: requests wait in routers, as they did in the live router that wrote the log."""
    scales = compared.rate_scales or (1.0,)
    if compared.utilisations:
        meant = dataclasses.replace(trials[0], variant=compared.of)
        scales = tuple(pace_at(utilisation, meant, run_all) for utilisation in compared.utilisations)
    at_scales = [dataclasses.replace(trial, rate_scale=scale, holds=holds) for scale in scales for trial in trials]
    return [(trial.rate_scale, run) for trial, run in zip(at_scales, run_all(at_scales), strict=True)]


def _heading(flags_given: SimulateFlags, trace: Trace, shape: FleetShape) -> str:
    pulls = "peers are pulled from" if flags_given.compared.peer_pulls else "no pulls from peers"
    routers = f"{shape.routers} router{'s' if shape.routers > 1 else ''}"
    tiers = _tier_text(shape, Tier.HOST, shape.tiers.host_bytes) + _tier_text(shape, Tier.DISK, shape.tiers.disk_bytes)
    return (
        f"{flags_given.source.label}: {len(trace.rows)} requests; {shape.prefill} prefill workers of "
        f"{shape.prefill_pages * shape.block_size:,} tokens, {shape.decode} decode workers of "
        f"{shape.decode_pool_tokens:,}{tiers}; {shape.link_bytes_per_s / 1e9:g} GB/s; {routers}; {pulls}; "
        f"seed {flags_given.source.seed}"
    )


def _tier_text(shape: FleetShape, tier: Tier, size_bytes: int) -> str:
    if not size_bytes:
        return ""
    tokens, page_ms = size_bytes // shape.page_bytes * shape.block_size, 1e3 * shape.tier_page_s(tier)
    return f"; below the pages of each {tokens:,} on {tier.name.lower()} at {page_ms:.3g} ms a page"


def _print(compared: ComparisonOptions, shown: ComparedRuns, console: Console) -> None:
    print_summaries(shown.summaries, console)
    if shown.summaries:
        console.print(f"[dim]{explanation(compared.promise, shown.oracle_rate)}[/dim]")
    if compared.find_rate_s is not None:
        title = f"highest rate with a p90 TTFT up to {compared.find_rate_s:g} s (all requests count)"
        console.print(table_of(rates_grid(shown.rates), title))
    for note in notes_of(shown.summaries):
        console.print(f"note: {note}", markup=False)
