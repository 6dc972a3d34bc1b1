"""Steps with a grammar in every row and steps without any, by turns on one engine."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.flags.checks import STDOUT
from tests.trials.bench.grammars.options import GrammarOptions
from tests.trials.bench.kernels.bench_attention import BLOCK, Span
from tests.trials.bench.kernels.bench_step import step_batch
from tools.output import write_json
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, ModelConfig, Role, RuntimeConfig, WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.build import build_runner
from twostroke.grammar.compiler import GrammarCompiler
from twostroke.grammar.state import GrammarState
from twostroke.grammar.vocabulary import load_vocabulary
from twostroke.models.catalog import places
from twostroke.models.registry import read_spec
from twostroke.request import Grammar, SamplingParams
from twostroke.scheduler.batch import Batch, SampleRow
from twostroke.scheduler.windows.places import with_windows

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 80},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "kind": {"enum": ["novel", "poem", "essay", "play"]},
        "score": {"type": "number"},
        "authors": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1, "maxItems": 3},
    },
    "required": ["title", "year", "kind", "score", "authors"],
    "additionalProperties": False,
}
"""Strings, numbers, a choice and a list, as clients send them. Only names of properties are forced."""
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    temperature: float
    plain_ms: float
    """Median of steps without grammars."""
    grammar_ms: float
    """Median of steps in which each answer has a grammar, masks and consumed tokens included."""
    ratio: float
    """Median over turns of a step with grammars over the one before it without."""
    mask_us: float
    """Median of one mask."""
    mask_p99_us: float
    mask_p99_share: float
    """The 99th percentile of a mask over a step without grammars."""
    consume_us: float
    """Mean of what follows a token: it is consumed, and so are those that are forced after it."""
    forced_share: float


class Answers:
    """Answers that follow the schema; one that ends begins again."""

    def __init__(self, compiler: GrammarCompiler, count: int) -> None:
        self._compiler = compiler
        self._states = [self._begun() for _ in range(count)]
        self._ended: list[GrammarState] = []

    @property
    def forced_share(self) -> float:
        """Share of tokens that were forced."""
        states = [*self._ended, *self._states]
        return sum(state.forced_tokens for state in states) / sum(state.tokens for state in states)

    def masked(self, batch: Batch) -> Batch:
        rows = zip(batch.samples, self._states, strict=True)
        return replace(batch, samples=tuple([row._replace(mask=state.mask) for row, state in rows]))

    def consume(self, tokens: Sequence[int]) -> None:
        ends = self._compiler.vocabulary.ends
        for row, token in enumerate(tokens):
            state, tail = self._states[row], [token]
            while tail and tail[-1] not in ends:
                state.consume(tail[-1])
                forced = state.take_forced()
                tail = [] if forced is None else [forced]
            assert state.failure is None, state.failure
            if tail:
                self._ended.append(state)
                self._states[row] = self._begun()

    def _begun(self) -> GrammarState:
        return self._compiler.state(Grammar(json.dumps({"grammars": [{"json_schema": SCHEMA}]})))


def run_session(options: GrammarOptions) -> int:
    model_dir = _model_dir(options)
    spec, model = read_spec(model_dir), ModelConfig(model=options.model, dtype=options.dtype, device="cpu")
    pages = options.streams * -(-options.context // BLOCK)
    built = build_runner(
        WorkerConfig(
            role=Role.DECODE,
            worker_id="bench",
            runtime=RuntimeConfig(threads=options.threads, borrow=False),
            model=model,
            cache=CacheConfig(block_size=BLOCK, kv_cache_memory_bytes=pages * spec.page_bytes(BLOCK, options.dtype)),
        ),
        model_dir,
    )
    try:
        rows = [_measured(options, built, model_dir, temperature) for temperature in TEMPERATURES]
    finally:
        built.close()
    Console(stderr=options.json_path == STDOUT).print(_table(options, rows))
    write_json(
        {"schema_version": 1, "options": options.model_dump(), "rows": [asdict(row) for row in rows]},
        options.json_path,
    )
    return 0


def _measured(options: GrammarOptions, built: BuiltEngine, model_dir: Path, temperature: float) -> Row:
    facts, masks_s = built.model, list[float]()
    vocabulary = load_vocabulary(str(model_dir), facts.vocab_size, facts.eos_token_ids)
    answers = Answers(GrammarCompiler(vocabulary, masks_s.append), options.streams)
    whole = step_batch(Span(options.streams, 1, options.context), facts.vocab_size)
    batch = with_windows(whole, facts.window_shape)
    plain_s, grammar_s, consume_s = list[float](), list[float](), list[float]()
    for turn in range(options.repeats + 1):
        drawn = replace(batch, samples=tuple(_rows(options, temperature, turn)))
        began_s = time.perf_counter()
        built.runner.run(drawn)
        plain_end_s = time.perf_counter()
        result = built.runner.run(answers.masked(drawn))
        run_end_s = time.perf_counter()
        answers.consume([sampled.token for sampled in result.tokens])
        end_s = time.perf_counter()
        if turn:  # the first step of each kind allocates memory
            plain_s.append(plain_end_s - began_s)
            grammar_s.append(end_s - plain_end_s)
            consume_s.append((end_s - run_end_s) / options.streams)
    mask_p99_s = statistics.quantiles(masks_s, n=100)[98]
    return Row(
        temperature=temperature,
        plain_ms=statistics.median(plain_s) * 1e3,
        grammar_ms=statistics.median(grammar_s) * 1e3,
        ratio=statistics.median([with_s / plain for with_s, plain in zip(grammar_s, plain_s, strict=True)]),
        mask_us=statistics.median(masks_s) * 1e6,
        mask_p99_us=mask_p99_s * 1e6,
        mask_p99_share=mask_p99_s / statistics.median(plain_s),
        consume_us=statistics.fmean(consume_s) * 1e6,
        forced_share=answers.forced_share,
    )


def _rows(options: GrammarOptions, temperature: float, turn: int) -> list[SampleRow]:
    params = [SamplingParams(seed=seed, max_tokens=1, temperature=temperature) for seed in range(options.streams)]
    return [SampleRow(row, each, options.context + turn) for row, each in enumerate(params)]


def _model_dir(options: GrammarOptions) -> Path:
    found = places.locate(options.model, options.dtype)
    if found is None:
        raise ConfigError(
            f"{options.model} in {options.dtype} is not on this machine; fetch it with "
            f"`twostroke model pull {options.model}`",
            field="model",
        )
    return found


def _table(options: GrammarOptions, rows: Sequence[Row]) -> Table:
    table = Table(title=f"decode steps of {options.streams} answers, with a grammar each and without")
    columns = ("temperature", "step ms", "with them", "ratio", "mask us", "p99 us", "of a step", "token us", "forced")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.temperature:g}",
            f"{row.plain_ms:.1f}",
            f"{row.grammar_ms:.1f}",
            f"{row.ratio:.2f}",
            f"{row.mask_us:.0f}",
            f"{row.mask_p99_us:.0f}",
            f"{row.mask_p99_share:.1%}",
            f"{row.consume_us:.0f}",
            f"{row.forced_share:.0%}",
        )
    return table
