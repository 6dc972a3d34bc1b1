"""Every Triton kernel against its torch twin, over shapes, dtypes and pages that nobody has written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tests.trials.gpu.measure import DEVICE, ON_GPU
from tests.trials.gpu.report import Report, Row
from twostroke.kernels import reference
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.rules import AnyRules
from twostroke.kernels.attention.spans import Spans, TokenSlots
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.products.elementwise import TorchElementwise
from twostroke.kernels.triton.attention import TritonAttention
from twostroke.kernels.triton.elementwise import TritonElementwise

WORST = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Norm of the error over the norm of what is right."""


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    block: int = 16

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} {self.heads}/{self.kv_heads} heads of {self.dim}, blocks of {self.block}"


GPU_SHAPES = (
    Shape(torch.bfloat16, 32, 8, 128),
    Shape(torch.bfloat16, 8, 8, 64),
    Shape(torch.bfloat16, 9, 3, 64, block=32),
    Shape(torch.bfloat16, 8, 1, 128),
    Shape(torch.bfloat16, 8, 8, 80),
    Shape(torch.bfloat16, 12, 4, 96),
    Shape(torch.bfloat16, 16, 8, 256),
    Shape(torch.float16, 32, 8, 128),
    Shape(torch.float16, 8, 1, 64),
    Shape(torch.float16, 4, 4, 256, block=64),
    Shape(torch.float32, 8, 2, 64),
    Shape(torch.float32, 4, 2, 128),
)
INTERPRETED = (Shape(torch.float32, 4, 2, 64), Shape(torch.float16, 4, 1, 64), Shape(torch.float32, 2, 2, 80))
"""Not bfloat16, which the interpreter computes wrongly."""

GPU_SPANS = ((0, 1), (4095, 1), (777, 1), (16, 1), (100, 3), (0, 300), (1000, 129), (31, 17), (2047, 64))
INTERPRETED_SPANS = ((60, 1), (0, 40), (17, 3))
"""Per sequence: tokens that are in pages, new tokens."""


class Case:
    """On the host: a pool whose unwritten slots are NaN, and a step of ragged spans over scattered pages."""

    def __init__(self, shape: Shape, spans: tuple[tuple[int, int], ...], seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.shape = shape
        block, dim = shape.block, shape.dim
        blocks = [-(-(past + new) // block) for past, new in spans]
        count = sum(blocks) + 3
        order = torch.randperm(count, generator=random).tolist()
        page = (count, 2, 2, shape.kv_heads, block, dim)
        self.pool = torch.full(page, float("nan"), dtype=shape.dtype)
        self.tables = torch.zeros((len(spans), max(blocks)), dtype=torch.int32)
        slots, positions, self.starts = [], [], [0]
        for row, (past, new) in enumerate(spans):
            own = torch.tensor([order.pop() for _ in range(blocks[row])])
            self.tables[row, : len(own)] = own
            at = torch.arange(past + new)
            written = torch.randn((past, 2, 2, shape.kv_heads, dim), generator=random).to(shape.dtype)
            self.pool[own[at[:past] // block], :, :, :, at[:past] % block] = written
            slots.append(own[at[past:] // block] * block + at[past:] % block)
            positions.append(at[past:].int())
            self.starts.append(self.starts[-1] + new)
        self.slots, self.positions = torch.cat(slots), torch.cat(positions)
        self.contexts = tuple(past + new for past, new in spans)
        angles = self.positions[:, None].float() * torch.linspace(1, 0.01, dim // 2)
        self.cosines, self.sines = angles.cos(), angles.sin()
        tokens = self.starts[-1]
        fused = torch.randn((tokens, shape.heads + 2 * shape.kv_heads, dim), generator=random).to(shape.dtype)
        self.qkv = fused

    def split(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        heads = [self.shape.heads, self.shape.kv_heads, self.shape.kv_heads]
        return torch.split(self.qkv.to(device), heads, dim=1)

    def batch(self, device: torch.device) -> RaggedBatch:
        return RaggedBatch(
            positions=self.positions.to(device),
            query_starts=tuple(self.starts),
            context_lens=self.contexts,
            block_tables=self.tables.to(device),
            write_slots=self.slots.to(device),
            cosines=self.cosines.to(device),
            sines=self.sines.to(device),
        )


def relative_error(actual: torch.Tensor, right: torch.Tensor) -> float:
    """NaN where anything is NaN, which passes no comparison."""
    actual, right = actual.double().cpu(), right.double().cpu()
    return float((actual - right).norm() / right.norm())


def check_kernels(_report: Report) -> Iterator[Row]:
    for index, shape in enumerate(GPU_SHAPES if ON_GPU else INTERPRETED):
        case = Case(shape, GPU_SPANS if ON_GPU else INTERPRETED_SPANS, seed=index)
        errors = step_errors(case, DEVICE) | recorded_errors(case, DEVICE)
        errors |= elementwise_errors(shape, DEVICE)
        name, worst = max(errors.items(), key=lambda item: float("inf") if math.isnan(item[1]) else item[1])
        passed = all(error <= WORST[shape.dtype] for error in errors.values())
        yield Row(str(shape), f"{name} {worst:.1e}", None, f"<= {WORST[shape.dtype]:.0e}", passed)


def step_errors(
    case: Case, device: torch.device, rules: AnyRules | None = None, sinks: torch.Tensor | None = None
) -> dict[str, float]:
    """A mixed step: store, decode, short spans and prefill, with the rules of two layers, and sinks on the host."""
    rules = case.shape.dim**-0.5 if rules is None else rules
    right_pool = case.pool.clone()
    q, k, v = case.split(torch.device("cpu"))
    placement = TokenSlots(case.slots, case.cosines, case.sines)
    right_q = reference.rotate_and_store(q, k, v, PagePool.plain(right_pool), 1, placement)
    right = reference.paged_attention(
        right_q, PagePool.plain(right_pool), 1, case.batch(torch.device("cpu")), rules, sinks
    )
    backend = TritonAttention(PagePool.plain(case.pool.to(device)), case.shape.heads, rules)
    step = backend.begin(case.batch(device))
    actual_q = step.store(1, *case.split(device))
    actual = step.attend(1, actual_q, None if sinks is None else sinks.to(device)).view_as(right)
    pool = backend.pool.numbers.cpu()
    untouched = torch.equal(pool.isnan(), right_pool.isnan()) and torch.equal(
        pool[:, 0].nan_to_num(), case.pool[:, 0].nan_to_num()
    )
    return {
        "rope": relative_error(actual_q, right_q),
        "store": relative_error(pool.nan_to_num(), right_pool.nan_to_num()) if untouched else float("nan"),
        "attention": relative_error(actual, right),
    }


def recorded_errors(
    case: Case, device: torch.device, rules: AnyRules | None = None, sinks: torch.Tensor | None = None
) -> dict[str, float]:
    """The decoding entry, whose lengths lie on the device, over the spans of one row."""
    rows = [row for row in range(len(case.contexts)) if case.starts[row + 1] - case.starts[row] == 1]
    rules = case.shape.dim**-0.5 if rules is None else rules
    fields = torch.tensor([[row, at, 1, case.contexts[row]] for at, row in enumerate(rows)], dtype=torch.int32)
    pool = case.pool.nan_to_num()  # the new tokens' own slots are not written here, but read
    q = case.qkv[: len(rows), : case.shape.heads].contiguous()
    longest = case.tables.shape[1] * case.shape.block
    right = torch.empty_like(q)
    reference.span_attention(
        q, PagePool.plain(pool), 1, Spans(fields, case.tables, 1, longest), rules, right, sinks=sinks
    )
    backend = TritonAttention(PagePool.plain(pool.to(device)), case.shape.heads, rules)
    zeros = torch.zeros(len(rows), case.shape.dim // 2, device=device)
    placement = TokenSlots(torch.zeros(len(rows), dtype=torch.int64, device=device), zeros, zeros)
    spans = Spans(fields.to(device), case.tables.to(device), 1, longest)
    actual = backend.begin_decode(spans, placement).attend(1, q.to(device), None if sinks is None else sinks.to(device))
    return {"decode": relative_error(actual.view_as(right), right)}


def elementwise_errors(shape: Shape, device: torch.device) -> dict[str, float]:
    rows, width = (33, 1536) if device.type == "cuda" else (3, 96)
    torch.manual_seed(0)
    x, residual, wide = (torch.randn(rows, n).to(shape.dtype) for n in (width, width, 2 * width))
    weight = torch.randn(width).to(shape.dtype)
    right, actual = TorchElementwise(), TritonElementwise()
    normed, total = right.add_norm(x.float(), residual.float(), weight.float(), 1e-5)
    my_normed, my_total = actual.add_norm(x.to(device), residual.to(device), weight.to(device), 1e-5)
    alone = actual.norm(x.to(device), weight.to(device), 1e-5)
    return {
        "norm": relative_error(alone, right.norm(x.float(), weight.float(), 1e-5)),
        "add_norm": relative_error(my_normed, normed),
        "sum": relative_error(my_total, total),
        "silu": relative_error(actual.silu_mul(wide.to(device)), right.silu_mul(wide.float())),
    }
