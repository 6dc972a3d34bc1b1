"""How fast attention is: decode as a share of the copy bandwidth, prefill as a share of the matmul rate."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tests.trials.gpu.kernels import WORST, relative_error
from tests.trials.gpu.measure import DEVICE, ON_GPU, free_bytes, l2_bytes, replayed_ms
from tests.trials.gpu.report import Report, Row
from tests.trials.gpu.shapes import BLOCK, LLAMA_8B, TINY, scattered_tables
from twostroke.kernels import reference
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.spans import Spans, TokenSlots
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.triton.attention import TritonAttention
from twostroke.kernels.triton.decode import DecodeTuning
from twostroke.kernels.triton.prefill import PrefillTuning

SPEC = LLAMA_8B if ON_GPU else TINY
DTYPE = torch.bfloat16 if ON_GPU else torch.float32  # which the interpreter computes rightly
HEADS, KV_HEADS, DIM = SPEC.heads, SPEC.kv_heads, SPEC.head_dim
SCALE = DIM**-0.5
DECODE_SHARE = 0.80
PREFILL_SHARE = 0.50
JUDGED_BATCH = 64
"""Below, a layer's launch reads so little that it ends before all of the chip is at work."""
LEAST_LAYERS = 6
DECODES = [(batch, context) for batch in (1, 16, 64) for context in (2048, 8192)] if ON_GPU else [(1, 32), (2, 64)]
CHUNKS = (2048, 8192) if ON_GPU else (64,)


def random_pool(pages: int, layers: int) -> torch.Tensor:
    pool = torch.empty((pages, layers, 2, KV_HEADS, BLOCK, DIM), dtype=DTYPE, device=DEVICE)
    for part in pool.split(4096):
        part.normal_()
    return pool


def layers_for(bytes_per_layer: int) -> int:
    """So many that one round over them reads several times what the cache holds, and hides how a round begins."""
    return min(SPEC.layers, max(LEAST_LAYERS, -(-4 * l2_bytes() // bytes_per_layer)))


def decode_speed(report: Report) -> Iterator[Row]:
    copied = report.ceilings["copy"]
    for batch, context in DECODES:
        kv_bytes = batch * context * 2 * KV_HEADS * DIM * DTYPE.itemsize
        layers = layers_for(kv_bytes)
        if kv_bytes * layers * 1.2 > free_bytes():
            report.not_run.append(f"decode attention batch {batch} context {context}: too large for this GPU")
            continue
        seconds, error = decode_s(batch, context, layers)
        share = kv_bytes / seconds / copied
        is_right = error <= WORST[DTYPE]
        judged = batch >= JUDGED_BATCH
        yield Row(
            f"decode attention, batch {batch}, context {context}",
            f"{seconds * 1e6:.0f} us" + ("" if is_right else f", error {error:.1e}"),
            share,
            f">= {DECODE_SHARE:.2f}" if judged else "of copy",
            is_right and share >= DECODE_SHARE if judged or not is_right else None,
        )


def decode_s(batch: int, context: int, layers: int, tuning: DecodeTuning | None = None) -> tuple[float, float]:
    """(seconds per layer, relative error of the first and last sequence)."""
    tables = scattered_tables(batch, context // BLOCK)
    pool = random_pool(tables.size, layers)
    backend = TritonAttention(PagePool.plain(pool), HEADS, SCALE, decode=tuning)
    q = torch.randn(batch, HEADS, DIM, device=DEVICE).to(DTYPE)
    host_fields = [[row, row, 1, context] for row in range(batch)]
    fields = torch.tensor(host_fields, dtype=torch.int32, device=DEVICE)
    spans = Spans(fields, torch.from_numpy(tables).to(DEVICE), 1, context)
    half = torch.zeros(batch, DIM // 2, device=DEVICE)
    slots = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    outs: list[torch.Tensor] = []

    def every_layer() -> None:
        step = backend.begin_decode(spans, TokenSlots(slots, half, half))
        outs[:] = [step.attend(layer, q) for layer in range(layers)]

    seconds = replayed_ms(every_layer) / 1e3 / layers
    errors = [_row_error(pool, tables, q, outs[-1], row) for row in {0, batch - 1}]
    return seconds, max(errors)


def _row_error(pool: torch.Tensor, tables: np.ndarray, q: torch.Tensor, out: torch.Tensor, row: int) -> float:  # type: ignore[type-arg]
    """Returns the error of one sequence in the last layer, against the reference on the host."""
    own = pool[torch.from_numpy(tables[row]).long().to(DEVICE), -1:].cpu()
    context = len(own) * BLOCK
    spans = Spans(
        torch.tensor([[0, 0, 1, context]], dtype=torch.int32),
        torch.arange(len(own), dtype=torch.int32)[None],
        1,
        context,
    )
    right = torch.empty(1, HEADS, DIM, dtype=q.dtype)
    reference.span_attention(q[row, None].cpu(), PagePool.plain(own), 0, spans, SCALE, right)
    return relative_error(out[row].view(1, HEADS, DIM), right)


def prefill_speed(report: Report) -> Iterator[Row]:
    rate = report.ceilings["matmul"]
    for tokens in CHUNKS:
        flop = 4 * HEADS * DIM * tokens * (tokens + 1) // 2
        seconds = prefill_s(tokens)
        share = flop / seconds / rate
        yield Row(
            f"prefill attention, chunk {tokens}",
            f"{seconds * 1e6:.0f} us",
            share,
            f">= {PREFILL_SHARE:.2f}",
            share >= PREFILL_SHARE,
        )


def prefill_s(tokens: int, tuning: PrefillTuning | None = None) -> float:
    """Seconds per layer of one whole prompt; its first rows are compared with the reference."""
    tables = scattered_tables(1, tokens // BLOCK)
    layers = layers_for(tokens * 2 * KV_HEADS * DIM * DTYPE.itemsize)
    pool = random_pool(tables.size, layers)
    q = torch.randn(tokens, HEADS, DIM, device=DEVICE).to(DTYPE)
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    half = torch.zeros(tokens, DIM // 2, device=DEVICE)
    batch = RaggedBatch(
        positions=positions,
        query_starts=(0, tokens),
        context_lens=(tokens,),
        block_tables=torch.from_numpy(tables).to(DEVICE),
        write_slots=positions.long(),
        cosines=half,
        sines=half,
    )
    step = TritonAttention(PagePool.plain(pool), HEADS, SCALE, prefill=tuning).begin(batch)
    outs: list[torch.Tensor] = []

    def every_layer() -> None:
        outs[:] = [step.attend(layer, q) for layer in range(layers)]

    seconds = replayed_ms(every_layer) / 1e3 / layers
    first = 4 * BLOCK
    own = pool[torch.from_numpy(tables[0, :4]).long().to(DEVICE), -1:].cpu()
    spans = Spans(
        torch.tensor([[0, 0, first, first]], dtype=torch.int32), torch.arange(4, dtype=torch.int32)[None], first, first
    )
    right = torch.empty(first, HEADS, DIM, dtype=q.dtype)
    reference.span_attention(q[:first].cpu(), PagePool.plain(own), 0, spans, SCALE, right)
    error = relative_error(outs[-1][:first].view_as(right), right)
    assert error <= WORST[DTYPE], f"prefill of {tokens} tokens is wrong by {error:.1e}"
    return seconds
