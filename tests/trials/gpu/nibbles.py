"""Triton's kernels of 4-bit pages: against torch on the host, over chunks and recorded decode steps, and timed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tests.trials.gpu.attention import LEAST_LAYERS, layers_for
from tests.trials.gpu.kernels import WORST, relative_error
from tests.trials.gpu.measure import DEVICE, ON_GPU, free_bytes, recorded, replayed_ms
from tests.trials.gpu.report import Report, Row
from tests.trials.gpu.shapes import BLOCK, LLAMA_8B, TINY, scattered_tables
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.spans import Spans, TokenSlots
from twostroke.kernels.page_forms.exact_pages import ExactPages
from twostroke.kernels.page_forms.nibble_attention import NibbleAttention
from twostroke.kernels.page_forms.nibble_pool import NibblePool, packed, unpacked
from twostroke.kernels.triton.decode import DecodeTuning
from twostroke.kernels.triton.page_forms.nibble_attention import TritonNibbleAttention
from twostroke.kv_cache.form import FORMS
from twostroke.page_forms.page_form import PageShape

LAYER, LAYERS = 1, 2
HOST = torch.device("cpu")
Chunks = list[tuple[int, int, int]]
"""Sequence, from, to."""


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"int4 pages, {name} {self.heads}/{self.kv_heads} heads of {self.dim}"

    @property
    def page(self) -> PageShape:
        return PageShape(LAYERS, self.kv_heads, BLOCK, self.dim)


GPU_SHAPES = (
    Shape(torch.bfloat16, 32, 8, 128),
    Shape(torch.bfloat16, 9, 3, 64),
    Shape(torch.bfloat16, 8, 8, 80),
    Shape(torch.bfloat16, 16, 2, 256),
    Shape(torch.float16, 8, 1, 64),
    Shape(torch.float32, 8, 2, 64),
)
INTERPRETED = (Shape(torch.float32, 4, 2, 64), Shape(torch.float16, 3, 1, 24))
LENGTHS = (777, 1, 300, 16) if ON_GPU else (40, 1, 18)
CUTS = (257, 16, 1, 100) if ON_GPU else (21, 16, 1)
RECORDED = 20 if ON_GPU else 3
"""The last tokens of each sequence, which a recorded step computes one by one."""

TIMED = LLAMA_8B if ON_GPU else TINY
TIMED_DTYPE = torch.bfloat16 if ON_GPU else torch.float32
DECODES = [(batch, context) for batch in (1, 16, 64) for context in (2048, 8192)] if ON_GPU else [(2, 48)]
PREFILLS = (2048, 8192) if ON_GPU else (48,)
SAMPLE = 64
"""Pages of numbers that are drawn; the others repeat them."""
INTERPRETED_TUNING = None if ON_GPU else DecodeTuning(keys=32, warps=4, stages=2, least_share=32)
"""The tiles a device would choose depend on its memory; the interpreter has none."""


class Case:
    """On the host: sequences whose keys are not rotated, so that both sides store the bits of the same numbers."""

    def __init__(self, shape: Shape, lengths: tuple[int, ...], seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.shape, self.lengths = shape, lengths
        self.tables = torch.from_numpy(scattered_tables(len(lengths), -(-max(lengths) // BLOCK), seed))
        heads = [shape.heads, shape.kv_heads, shape.kv_heads]
        drawn = [torch.randn((length, sum(heads), shape.dim), generator=random) for length in lengths]
        self.rows = [torch.split(x.to(shape.dtype), heads, dim=1) for x in drawn]

    def batch(self, chunks: Chunks, device: torch.device) -> RaggedBatch:
        """Returns a step on the device; its tables and its angles are there, as those of a runner are."""
        positions = torch.cat([torch.arange(start, end) for _, start, end in chunks])
        rows = torch.cat([torch.full((end - start,), row) for row, start, end in chunks])
        counts = torch.tensor([0, *(end - start for _, start, end in chunks)])
        slots = self.tables[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK
        angles = torch.zeros(len(positions), self.shape.dim // 2, device=device)
        return RaggedBatch(
            positions=positions.int().to(device),
            query_starts=tuple(counts.cumsum(0).tolist()),
            context_lens=tuple(end for *_, end in chunks),
            block_tables=self.tables[[row for row, *_ in chunks]].contiguous().to(device),
            write_slots=slots.to(device),
            cosines=angles.cos(),
            sines=angles.sin(),
        )

    def heads_of(self, chunks: Chunks, device: torch.device) -> tuple[torch.Tensor, ...]:
        parts = [[x[start:end] for x in self.rows[row]] for row, start, end in chunks]
        return tuple(torch.cat(each).contiguous().to(device) for each in zip(*parts, strict=True))

    def pages(self, device: torch.device) -> torch.Tensor:
        """Returns pages that nobody has written."""
        size = (self.tables.numel(), FORMS["int4"].page_bytes(self.shape.page))
        return torch.full(size, 0xFF, dtype=torch.uint8, device=device)


class Reference:
    """All sequences at once in torch: what each block stores and what each row attends to."""

    def __init__(self, case: Case) -> None:
        shape = case.shape
        self.pool = NibblePool.over(case.pages(HOST), shape.page, shape.dtype)
        whole = [(row, 0, length) for row, length in enumerate(case.lengths)]
        step = NibbleAttention(self.pool, shape.heads, shape.dim**-0.5).begin(case.batch(whole, HOST))
        q, k, v = case.heads_of(whole, HOST)
        rows = step.attend(LAYER, step.store(LAYER, q, k, v))
        self.rows = rows.split(list(case.lengths))


class Ours:
    """The device's pages, with a number of exact pages that is fixed."""

    def __init__(self, case: Case) -> None:
        shape, count = case.shape, case.tables.numel()
        exact = ExactPages.fixed(count, count, shape.page, shape.dtype, DEVICE)
        exact.pool.numbers.fill_(float("nan"))
        self.case = case
        self.pool = NibblePool.over(case.pages(DEVICE), shape.page, shape.dtype, exact)
        self.backend = TritonNibbleAttention(self.pool, shape.heads, shape.dim**-0.5, tuning=INTERPRETED_TUNING)

    def run(self, chunks: Chunks) -> tuple[torch.Tensor, ...]:
        """Stores and attends in one step; returns each chunk's rows."""
        exact_slots = self.exact_slots(chunks).to(DEVICE)
        step = self.backend.begin(replace(self.case.batch(chunks, DEVICE), exact_slots=exact_slots))
        q, k, v = self.case.heads_of(chunks, DEVICE)
        return step.attend(LAYER, step.store(LAYER, q, k, v)).split([end - start for _, start, end in chunks])

    def exact_slots(self, chunks: Chunks) -> torch.Tensor:
        return self.pool.exact.begin(self.case.batch(chunks, HOST))


def chunks_of(lengths: tuple[int, ...], cuts: tuple[int, ...]) -> list[Chunks]:
    """Returns steps in which each sequence advances by so many tokens until it is whole."""
    done, steps = [0] * len(lengths), []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        cut = cuts[len(steps) % len(cuts)]
        ends = [min(at + cut, length) for at, length in zip(done, lengths, strict=True)]
        steps.append([(row, at, end) for row, (at, end) in enumerate(zip(done, ends, strict=True)) if end > at])
        done = ends
    return steps


def check_nibbles(_report: Report) -> Iterator[Row]:
    for index, shape in enumerate(GPU_SHAPES if ON_GPU else INTERPRETED):
        case = Case(shape, LENGTHS, seed=index)
        right = Reference(case)
        errors = {"chunks": chunk_error(case, right), "recorded": recorded_error(case, right)}
        name, largest = max(errors.items(), key=lambda item: float("inf") if math.isnan(item[1]) else item[1])
        passed = all(error <= WORST[shape.dtype] for error in errors.values())
        yield Row(str(shape), f"{name} {largest:.1e}", None, f"<= {WORST[shape.dtype]:.0e}", passed)


def chunk_error(case: Case, right: Reference) -> float:
    """Returns the worst error of a chunk's rows; NaN where a block does not hold the bits that torch packs."""
    ours, errors = Ours(case), []
    for chunks in chunks_of(case.lengths, CUTS):
        for (row, start, end), rows in zip(chunks, ours.run(chunks), strict=True):
            errors.append(relative_error(rows, right.rows[row][start:end]))
    return worst(errors) if equal_blocks(case, ours.pool, right.pool) else float("nan")


def recorded_error(case: Case, right: Reference) -> float:
    """The same of decode steps that are planned once, over tensors that are rewritten before each."""
    rows = [row for row, length in enumerate(case.lengths) if length > RECORDED]
    ours, starts = Ours(case), [case.lengths[row] - RECORDED for row in rows]
    ours.run([(row, 0, start) for row, start in zip(rows, starts, strict=True)])
    turns = [
        [(row, at + turn, at + turn + 1) for row, at in zip(rows, starts, strict=True)] for turn in range(RECORDED)
    ]
    batch = case.batch(turns[0], DEVICE)
    fields = torch.tensor([[at, at, 1, 0] for at in range(len(rows))], dtype=torch.int32, device=DEVICE)
    exact_slots = torch.zeros_like(batch.write_slots)
    placement = TokenSlots(batch.write_slots, batch.cosines, batch.sines, exact_slots)
    inputs = [torch.zeros_like(x) for x in case.heads_of(turns[0], DEVICE)]
    spans = Spans(fields, batch.block_tables, 1, case.tables.shape[1] * BLOCK)
    step, outs, errors = ours.backend.begin_decode(spans, placement), [torch.empty(0)], []

    def enter(chunks: Chunks) -> None:
        fields[:, 3] = torch.tensor([end for *_, end in chunks])
        batch.write_slots.copy_(case.batch(chunks, DEVICE).write_slots)
        exact_slots.copy_(ours.exact_slots(chunks))
        for kept, new in zip(inputs, case.heads_of(chunks, DEVICE), strict=True):
            kept.copy_(new)

    def one_step() -> None:
        outs[0] = step.attend(LAYER, step.store(LAYER, *inputs))

    enter(turns[0])
    replay = recorded(one_step)
    for chunks in turns:
        enter(chunks)
        replay()
        errors += [relative_error(outs[0][at], right.rows[row][start]) for at, (row, start, _) in enumerate(chunks)]
    return worst(errors) if equal_blocks(case, ours.pool, right.pool, rows) else float("nan")


def worst(errors: list[float]) -> float:
    """NaN where one of them is NaN, which `max` may pass over."""
    return torch.tensor(errors).max().item()


def equal_blocks(case: Case, ours: NibblePool, right: NibblePool, rows: list[int] | None = None) -> bool:
    """Whether full blocks hold the bits that torch packs, and blocks that are not full hold nothing."""
    found, wanted = ours.heads.cpu(), right.heads
    for row in range(len(case.lengths)) if rows is None else rows:
        full = case.lengths[row] // BLOCK
        stored, begun = case.tables[row, :full].long(), case.tables[row, full:].long()
        if not torch.equal(found[stored, LAYER], wanted[stored, LAYER]) or not (found[begun] == 0xFF).all():
            return False
    return bool((found[:, 1 - LAYER] == 0xFF).all())


def nibble_speed(report: Report) -> Iterator[Row]:
    """Times recorded decode steps, and storing and attending of a whole prompt, over the pages of many layers."""
    copied = report.ceilings["copy"]
    for batch, context in DECODES:
        read_bytes = batch * context * head_bytes() * TIMED.kv_heads // BLOCK
        layers = layers_for(read_bytes)
        if read_bytes * layers * 2 > free_bytes():
            report.not_run.append(f"int4 decode batch {batch} context {context}: too large for this GPU")
            continue
        timed = Timed(batch, context, layers)
        seconds, error = timed.decode_s()
        is_right = error <= WORST[TIMED_DTYPE]
        told = f"{seconds * 1e6:.0f} us" + ("" if is_right else f", error {error:.1e}")
        share = read_bytes / seconds / copied
        yield Row(f"int4 decode, batch {batch}, context {context}", told, share, "of copy", None if is_right else False)
    for tokens in PREFILLS:
        timed = Timed(1, tokens, LEAST_LAYERS if ON_GPU else 1)
        flop = 4 * TIMED.heads * TIMED.head_dim * tokens * (tokens + 1) // 2
        store_s, attend_s = timed.prefill_s()
        yield Row(f"int4 store, chunk {tokens}", f"{store_s * 1e6:.0f} us")
        share = flop / attend_s / report.ceilings["matmul"]
        yield Row(f"int4 prefill, chunk {tokens}", f"{attend_s * 1e6:.0f} us", share, "of matmul")


def head_bytes() -> int:
    return FORMS["int4"].head_bytes(PageShape(1, TIMED.kv_heads, BLOCK, TIMED.head_dim))


class Timed:
    """Sequences of one length over scattered pages of so many layers, which hold normal numbers."""

    def __init__(self, sequences: int, context: int, layers: int) -> None:
        self.context, self.layers = context, layers
        self.tables = torch.from_numpy(scattered_tables(sequences, -(-context // BLOCK)))
        pages = self.tables.numel()
        shape = PageShape(layers, TIMED.kv_heads, BLOCK, TIMED.head_dim)
        data = torch.empty(pages, FORMS["int4"].page_bytes(shape), dtype=torch.uint8, device=DEVICE)
        exact = ExactPages.fixed(max(sequences, pages // sequences), pages, shape, TIMED_DTYPE, DEVICE)
        exact.pool.numbers.normal_()
        self.pool = NibblePool.over(data, shape, TIMED_DTYPE, exact)
        sample = packed(torch.randn(SAMPLE, TIMED.kv_heads, 2, BLOCK, TIMED.head_dim, device=DEVICE))
        for part in self.pool.heads.split(SAMPLE):
            part.copy_(sample[: len(part), None].expand_as(part))
        self.backend = TritonNibbleAttention(self.pool, TIMED.heads, TIMED.head_dim**-0.5, tuning=INTERPRETED_TUNING)

    def decode_s(self) -> tuple[float, float]:
        """(seconds per layer, relative error of the first and last sequence)."""
        count = len(self.tables)
        q = torch.randn(count, TIMED.heads, TIMED.head_dim, device=DEVICE).to(TIMED_DTYPE)
        host_fields = [[row, row, 1, self.context] for row in range(count)]
        fields = torch.tensor(host_fields, dtype=torch.int32, device=DEVICE)
        spans = Spans(fields, self.tables.to(DEVICE), 1, self.context)
        half = torch.zeros(count, TIMED.head_dim // 2, device=DEVICE)
        exact_slots = torch.arange(count, device=DEVICE) * BLOCK + (self.context - 1) % BLOCK
        outs: list[torch.Tensor] = []

        def every_layer() -> None:
            step = self.backend.begin_decode(spans, TokenSlots(torch.zeros_like(exact_slots), half, half, exact_slots))
            outs[:] = [step.attend(layer, q) for layer in range(self.layers)]

        seconds = replayed_ms(every_layer) / 1e3 / self.layers
        return seconds, worst([relative_error(outs[-1][row], self._right(row, q[row])) for row in {0, count - 1}])

    def _right(self, row: int, q: torch.Tensor) -> torch.Tensor:
        """Returns what one sequence's query attends to in the last layer: stored blocks, and its own exact one."""
        stored = unpacked(self.pool.heads[self.tables[row, :-1].long().to(DEVICE), -1].cpu(), TIMED.head_dim)
        own = self.pool.exact.pool.read(torch.tensor([row], device=DEVICE), self.layers - 1).cpu().float()
        k, v = torch.cat((stored.movedim(-3, 1), own)).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.context]
        grouped = q.cpu().float().view(TIMED.kv_heads, -1, TIMED.head_dim)
        return ((grouped @ k.mT * TIMED.head_dim**-0.5).softmax(dim=-1) @ v).flatten()

    def prefill_s(self) -> tuple[float, float]:
        """Seconds per layer of storing and of attending, of one whole prompt."""
        positions = torch.arange(self.context)
        slots = self.tables[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
        half = torch.zeros(self.context, TIMED.head_dim // 2, device=DEVICE)
        heads = [TIMED.heads, TIMED.kv_heads, TIMED.kv_heads]
        qkv = torch.randn(self.context, sum(heads), TIMED.head_dim, device=DEVICE).to(TIMED_DTYPE)
        q, k, v = (x.contiguous() for x in qkv.split(heads, dim=1))
        batch = RaggedBatch(
            positions=positions.int().to(DEVICE),
            query_starts=(0, self.context),
            context_lens=(self.context,),
            block_tables=self.tables.to(DEVICE),
            write_slots=slots.to(DEVICE),
            cosines=half.cos(),
            sines=half,
            exact_slots=positions.to(DEVICE),
        )
        step = self.backend.begin(batch)
        layers = range(self.layers)
        store_ms = replayed_ms(lambda: [step.store(layer, q, k, v) for layer in layers])
        attend_ms = replayed_ms(lambda: [step.attend(layer, q) for layer in layers])
        return store_ms / 1e3 / self.layers, attend_ms / 1e3 / self.layers
