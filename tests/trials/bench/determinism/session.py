"""Every engine with and without --deterministic, side by side: shares of identical streams, ratios of step times."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from cluster.flags.checks import STDOUT
from tests.trials.bench.determinism.options import DeterminismOptions
from tests.trials.bench.determinism.streams import Shares, Streams, pages_of_stream
from tests.trials.bench.kernels.bench_attention import BLOCK, Span
from tests.trials.bench.kernels.bench_step import step_batch
from tests.trials.bench.kernels.options import BEST
from tests.trials.bench.kernels.setting import overridden
from tools.output import write_json
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, ModelConfig, Role, RuntimeConfig, WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.backends.cpu.runner import ModelRunner
from twostroke.engine.build import build_runner
from twostroke.engine.determinism import Determinism
from twostroke.models.catalog import places
from twostroke.models.registry import read_spec

SCHEMA_VERSION: Final = 1
COLUMNS: Final = 150
STEPS: Final = {"decode 1": Span(1, 1, 128), "decode 16": Span(16, 1, 128), "prefill 512": Span(1, 512, 512)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    engine: str
    flag: bool
    """Whether --deterministic was given."""
    claim: Determinism
    shares: list[Shares]
    median_s: dict[str, float]
    ratio: dict[str, float]
    """Step times over those of the same engine without the flag."""


def run_session(options: DeterminismOptions) -> int:
    outcomes = [outcome for engine in options.engines.split(",") for outcome in _outcomes(options, engine.strip())]
    console = Console(stderr=options.json_path == STDOUT)
    if not console.is_terminal:
        console.width = COLUMNS
    console.print(_table(outcomes))
    write_json(as_json(options, outcomes), options.json_path)
    return 0


def as_json(options: DeterminismOptions, outcomes: list[Outcome]) -> dict[str, Any]:
    asked = options.model_dump(include={"model", "streams", "tokens", "repeats", "seed"})
    return {
        "schema_version": SCHEMA_VERSION,
        **asked,
        "results": [dataclasses.asdict(outcome) for outcome in outcomes],
    }


def _outcomes(options: DeterminismOptions, engine: str) -> Iterator[Outcome]:
    dtype, _, kernels = engine.partition(":")
    with ExitStack() as stack:
        built = []
        for flag in (False, True):
            print(f"bench: {engine}{' --deterministic' * flag}", file=sys.stderr, flush=True)
            model = ModelConfig(model=options.model, dtype=dtype, device="cpu", deterministic=flag)
            built.append(stack.enter_context(_engine(model, kernels or BEST, options)))
        seconds = _times(built, options.repeats)
        for turn, each in enumerate(built):
            assert isinstance(each.runner, ModelRunner)
            streams = Streams(
                each.runner,
                BLOCK,
                each.model.vocab_size,
                count=options.streams,
                tokens=options.tokens,
                seed=options.seed,
            )
            yield Outcome(
                engine=engine,
                flag=turn == 1,
                claim=each.determinism,
                shares=list(streams.shares()),
                median_s={step: statistics.median(turns[turn]) for step, turns in seconds.items()},
                ratio={
                    step: statistics.median(ours / plain for plain, ours in zip(turns[0], turns[turn], strict=True))
                    for step, turns in seconds.items()
                },
            )


@contextmanager
def _engine(model: ModelConfig, kernels: str, options: DeterminismOptions) -> Iterator[BuiltEngine]:
    directory = places.locate(model.model, model.dtype)
    if directory is None:
        raise ConfigError(
            f"{model.model} in {model.dtype} is not on this machine; run: twostroke model pull {model.model}",
            field="model",
        )
    pages = options.streams * pages_of_stream(BLOCK, options.tokens) + max(
        span.sequences * -(-span.context // BLOCK) for span in STEPS.values()
    )
    memory = pages * read_spec(directory).page_bytes(BLOCK, model.dtype)
    config = WorkerConfig(
        role=Role.DECODE,
        worker_id="bench",
        runtime=RuntimeConfig(borrow=False),
        model=model,
        cache=CacheConfig(block_size=BLOCK, kv_cache_memory_bytes=memory),
    )
    with overridden(kernels):
        built = build_runner(config, directory)
    try:
        yield built
    finally:
        built.close()


def _times(engines: list[BuiltEngine], repeats: int) -> dict[str, list[list[float]]]:
    """Processor seconds of each step (workers here have one thread), by engine, in turns; the first turn warms up."""
    seconds: dict[str, list[list[float]]] = {step: [[] for _ in engines] for step in STEPS}
    for step, span in STEPS.items():
        batch = step_batch(span, engines[0].model.vocab_size)
        for turn in range(repeats + 1):
            for each, taken in zip(engines, seconds[step], strict=True):
                started_s = time.process_time()
                each.runner.run(batch)
                if turn:
                    taken.append(time.process_time() - started_s)
    return seconds


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(title="identical streams (bit-identical), step times in ms", title_justify="left", box=None)
    ways = [each.way for each in outcomes[0].shares]
    for column in ("engine", "--deterministic", "claims", *ways, *STEPS):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for each in outcomes:
        shares = [f"{share.identical:.0%} ({share.bit_identical:.0%})" for share in each.shares]
        times = [f"{each.median_s[step] * 1e3:.1f} ({each.ratio[step]:.2f}x)" for step in STEPS]
        claim = "yes" if each.claim.holds else "no"
        table.add_row(each.engine, "yes" if each.flag else "no", claim, *shares, *times)
    return table
