"""Whole steps of the model as a decode worker runs them: from token ids to sampled tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tests.trials.bench.kernels.bench_attention import BLOCK, Span, attention_work
from tests.trials.bench.kernels.bench_linear import products_of
from tests.trials.bench.kernels.setting import Setting
from tests.trials.bench.kernels.timing import Result, Work, timed
from twostroke.config import CacheConfig, Role, RuntimeConfig, WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.engine.build import build_runner
from twostroke.request import SamplingParams
from twostroke.scheduler.batch import Batch, SampleRow
from twostroke.scheduler.windows.places import with_windows

STEPS = (Span(1, 1, 128), Span(1, 1, 1024), Span(16, 1, 128), Span(16, 1, 1024), Span(1, 512, 512))
GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0)


def bench_step(setting: Setting, spans: Sequence[Span] = STEPS) -> Iterator[Result]:
    fitting = [span for span in spans if span.context < setting.spec.max_position_embeddings]
    pages = max(span.sequences * -(-span.context // BLOCK) for span in fitting)
    page_bytes = setting.spec.page_bytes(BLOCK, setting.model.dtype)
    built = build_runner(
        WorkerConfig(
            role=Role.DECODE,
            worker_id="bench",
            runtime=RuntimeConfig(threads=setting.threads, borrow=False),
            model=setting.model,
            cache=CacheConfig(block_size=BLOCK, kv_cache_memory_bytes=pages * page_bytes),
        ),
        setting.model_dir,
    )
    try:
        for span in fitting:
            yield _timed_step(setting, built, span)
    finally:
        built.close()


def step_work(setting: Setting, span: Span) -> Work:
    """Every weight and every key and value once; the head for one row of each sequence."""
    spec, tokens = setting.spec, span.sequences * span.new
    products = products_of(spec)
    head = products["head"][0] * products["head"][1]
    weights = spec.layers * sum(outputs * inputs for name, (outputs, inputs) in products.items() if name != "head")
    attention = attention_work(setting, span, setting.model.dtype)
    return Work(
        bytes=(weights + head) * setting.weight_bytes + attention.bytes,
        operations=2.0 * (weights * tokens + head * span.sequences) + attention.operations,
    )


def _timed_step(setting: Setting, built: BuiltEngine, span: Span) -> Result:
    batch = with_windows(step_batch(span, setting.spec.vocab_size), built.model.window_shape)
    kind = "decode" if span.new == 1 else f"prefill of {span.new}"
    what = f"{kind}, {span.sequences} x {span.context} context"
    return setting.result(
        "step", what, step_work(setting, span), timed(lambda: built.runner.run(batch), setting.repeats)
    )


def step_batch(span: Span, vocab_size: int) -> Batch:
    draw = np.random.default_rng(0)
    blocks = -(-span.context // BLOCK)
    tables = draw.permutation(span.sequences * blocks).astype(np.int32).reshape(span.sequences, blocks)
    positions = np.arange(span.context - span.new, span.context, dtype=np.int32)
    slots = tables[:, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    count = span.sequences * span.new
    return Batch(
        tokens=draw.integers(0, vocab_size, count).astype(np.int32),
        positions=np.tile(positions, span.sequences),
        query_starts=np.arange(0, count + 1, span.new, dtype=np.int32),
        context_lens=np.full(span.sequences, span.context, np.int32),
        block_tables=tables,
        write_slots=slots.reshape(-1),
        samples=tuple(SampleRow(row, GREEDY, position=span.context) for row in range(span.sequences)),
    )
