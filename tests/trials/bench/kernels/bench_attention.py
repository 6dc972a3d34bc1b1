"""Attention over pages that lie scattered, as in a pool that has been used: all layers of a decode or prefill step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.trials.bench.kernels.setting import Setting
from tests.trials.bench.kernels.timing import Result, Work, timed, timed_by_turns
from tests.unit.kernels.pools.whole_pool import pool_over
from twostroke.config.cache import KV_FORMATS
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kernels.pools.parted_pool import AnyPool
from twostroke.kv_cache.form import Conversion, KvForm, page_form

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Span:
    """Sequences that all have so many new tokens at the end of so long a context."""

    sequences: int
    new: int
    context: int


MANY_STREAMS = Span(16, 1, 1024)
DECODE = (Span(1, 1, 1024), Span(4, 1, 1024), Span(16, 1, 128), MANY_STREAMS, Span(4, 1, 4096))
PREFILL = (Span(1, 512, 512), Span(1, 512, 2048))


def bench_decode(setting: Setting, spans: Sequence[Span] = DECODE) -> Iterator[Result]:
    for span in spans:
        yield _timed_span(setting, "decode", span, _described(span))


def bench_prefill(setting: Setting, spans: Sequence[Span] = PREFILL) -> Iterator[Result]:
    for span in spans:
        yield _timed_span(setting, "prefill", span, f"{span.new} tokens at the end of {span.context}")


def bench_forms(setting: Setting) -> Iterator[Result]:
    """Times attention of many streams over pages of each form; all take turns, so that they meet the same machine."""
    names = list(dict.fromkeys((setting.model.dtype, *KV_FORMATS)))
    calls = [all_layers(setting, MANY_STREAMS, name) for name in names]
    for name, found in zip(names, timed_by_turns(calls, setting.repeats), strict=True):
        work = attention_work(setting, MANY_STREAMS, name)
        yield setting.result("forms", f"{name}, {_described(MANY_STREAMS)}", work, found)


def attention_work(setting: Setting, span: Span, form: str) -> Work:
    """Work of all layers: every key and value is read once; a query and a key, or weights and values, are 2 * dim."""
    spec = setting.spec
    token_bytes = page_form(form).page_bytes(spec.page_shape(BLOCK)) / BLOCK
    pairs = span.sequences * sum(range(span.context - span.new + 1, span.context + 1))
    return Work(
        bytes=span.sequences * span.context * token_bytes,
        operations=float(spec.layers * pairs * spec.heads * spec.head_dim * 4),
    )


def _described(span: Span) -> str:
    return f"{span.sequences} x {span.context} context"


def _timed_span(setting: Setting, part: str, span: Span, what: str) -> Result:
    form = setting.model.dtype
    call = all_layers(setting, span, form)
    return setting.result(part, what, attention_work(setting, span, form), timed(call, setting.repeats))


@torch.inference_mode()
def all_layers(setting: Setting, span: Span, form: str) -> Callable[[], None]:
    """Returns the attention of one step, layer by layer, over pages that hold normal numbers."""
    spec = setting.spec
    blocks = -(-span.context // BLOCK)
    pool = _filled_pool(setting, span.sequences * blocks, form)
    backend = choose_attention(
        pool,
        heads=spec.heads,
        rules=spec.rules,
        kernels=setting.kernels,
        dtype=setting.dtype,
        team=setting.team,
    )
    batch = _batch(span, blocks, pool.rope_dim)
    q = torch.randn(span.sequences * span.new, spec.heads, spec.head_dim).to(setting.dtype)

    @torch.inference_mode()
    def attend() -> None:
        with setting.step():
            step = backend.begin(batch)
            for layer in range(spec.layers):
                step.attend(layer, q)

    return attend


def _filled_pool(setting: Setting, pages: int, form: str) -> AnyPool:
    """Returns pages that hold normal numbers."""
    shape = setting.spec.page_shape(BLOCK)
    data = torch.empty(pages, page_form(form).page_bytes(shape), dtype=torch.uint8)
    conversion = Conversion(KvForm("float32"), KvForm(form), shape, has_pieces=False)
    numbers = page_form("float32").page_bytes(shape) // 4
    for page in data:
        convert_page(conversion, torch.randn(numbers).view(torch.uint8), page)
    return pool_over(data, page_form(form), shape, setting.dtype)


def _batch(span: Span, blocks: int, rope_dim: int) -> RaggedBatch:
    pages = torch.randperm(span.sequences * blocks, dtype=torch.int32).view(span.sequences, blocks)
    positions = torch.arange(span.context - span.new, span.context, dtype=torch.int32).repeat(span.sequences)
    rows = torch.arange(span.sequences).repeat_interleave(span.new)
    slots = pages[rows, positions.long() // BLOCK].long() * BLOCK + positions.long() % BLOCK
    angles = torch.zeros(len(positions), rope_dim // 2)
    return RaggedBatch(
        positions=positions,
        query_starts=tuple(range(0, len(positions) + 1, span.new)),
        context_lens=(span.context,) * span.sequences,
        block_tables=pages,
        write_slots=slots,
        cosines=angles.cos(),
        sines=angles.sin(),
    )
