"""The native kernel and the torch path against the oracle, over random shapes, pages and ragged batches."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.kernels import reference
from twostroke.kernels.attention import AttentionBackend, RaggedBatch
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.cpu import build
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels, load_kernels
from twostroke.kernels.torch_attention import TorchAttention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    library = load_kernels(tmp_path_factory.mktemp("kernels"))
    assert library is not None, "the gate's machine has a compiler"
    return library


shapes = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 3),
        "groups": st.integers(1, 4),
        "head_dim": st.sampled_from([8, 20, 64, 128]),
        "block": st.sampled_from([1, 4, 16, 32]),
        "dtype": st.sampled_from(list(TOLERANCE)),
        "spans": st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=4),
        "seed": st.integers(0, 1000),
    }
)
"""`spans`: per sequence (tokens already in pages, new tokens)."""


class Case:
    """A pool with random content, and a batch whose sequences own scattered pages."""

    def __init__(self, shape: dict) -> None:  # type: ignore[type-arg]  # a hypothesis draw
        self.random = torch.Generator().manual_seed(shape["seed"])
        self.block, self.dim, self.dtype = shape["block"], shape["head_dim"], shape["dtype"]
        self.kv_heads, self.heads = shape["kv_heads"], shape["kv_heads"] * shape["groups"]
        self.scale = self.dim**-0.5
        spans = shape["spans"]
        blocks = [-(-(past + new) // self.block) for past, new in spans]
        self.pool = self.normal(sum(blocks) + 3, 2, 2, self.kv_heads, self.block, self.dim)
        pages = torch.randperm(len(self.pool), generator=self.random, dtype=torch.int32).tolist()
        tables = torch.zeros(len(spans), max(blocks), dtype=torch.int32)
        for row, count in enumerate(blocks):
            tables[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
        positions = [torch.arange(past, past + new, dtype=torch.int32) for past, new in spans]
        self.positions = torch.cat(positions)
        slots = [
            tables[row, at // self.block].long() * self.block + at % self.block for row, at in enumerate(positions)
        ]
        starts = [0]
        for _, new in spans:
            starts.append(starts[-1] + new)
        angles = self.positions[:, None].float() * torch.linspace(1, 0.01, self.dim // 2)
        self.batch = RaggedBatch(
            positions=self.positions,
            query_starts=tuple(starts),
            context_lens=tuple(past + new for past, new in spans),
            block_tables=tables,
            write_slots=torch.cat(slots),
            cosines=angles.cos(),
            sines=angles.sin(),
        )

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Three views of one fused row, as the model has them."""
        heads = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = torch.split(self.normal(len(self.positions), sum(heads), self.dim), heads, dim=1)
        return q, k, v


def check_against_reference(case: Case, backend: AttentionBackend, pool: torch.Tensor) -> None:
    """`pool` is what `backend` works on: a copy of the case's."""
    layer = 1
    q, k, v = case.qkv()
    rotated = reference.rotate(q, case.batch.cosines, case.batch.sines)
    reference.write_kv(
        reference.rotate(k, case.batch.cosines, case.batch.sines), v, case.pool, layer, case.batch.write_slots
    )
    expected = reference.paged_attention(rotated, case.pool, layer, case.batch, case.scale)
    step = backend.begin(case.batch)
    actual_q = step.store(layer, q, k, v)
    actual = step.attend(layer, actual_q).view_as(expected)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(actual_q, rotated, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pool, case.pool, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(shape=shapes)
def test_the_native_kernel_equals_the_reference(library: Kernels, shape: dict) -> None:  # type: ignore[type-arg]
    case = Case(shape)
    pool = case.pool.clone()
    check_against_reference(case, NativeAttention(pool, case.heads, case.scale, library), pool)


@settings(max_examples=30, deadline=None)
@given(shape=shapes)
def test_the_torch_path_equals_the_reference(shape: dict) -> None:  # type: ignore[type-arg]
    case = Case(shape)
    pool = case.pool.clone()
    check_against_reference(case, TorchAttention(pool, case.heads, case.scale), pool)


def test_a_long_chunk_is_cut_into_tiles_without_changing_its_result() -> None:
    case = Case(
        {
            "kv_heads": 1,
            "groups": 2,
            "head_dim": 8,
            "block": 16,
            "dtype": torch.float32,
            "spans": [(50, 300)],
            "seed": 1,
        }
    )
    pool = case.pool.clone()
    check_against_reference(case, TorchAttention(pool, case.heads, case.scale), pool)


def test_other_layers_and_pages_are_left_alone(library: Kernels) -> None:
    case = Case(
        {"kv_heads": 2, "groups": 1, "head_dim": 8, "block": 4, "dtype": torch.float32, "spans": [(0, 6)], "seed": 3}
    )
    before = case.pool.clone()
    NativeAttention(case.pool, case.heads, case.scale, library).begin(case.batch).store(1, *case.qkv())
    changed = (case.pool != before).flatten(2).any(dim=2)
    assert not changed[:, 0].any()
    written = sorted({int(slot) // 4 for slot in case.batch.write_slots})
    assert changed[:, 1].nonzero().flatten().tolist() == written


def test_scores_far_apart_neither_overflow_nor_vanish(library: Kernels) -> None:
    case = Case(
        {"kv_heads": 1, "groups": 1, "head_dim": 8, "block": 4, "dtype": torch.float32, "spans": [(30, 1)], "seed": 5}
    )
    case.pool *= 300
    pool = case.pool.clone()
    check_against_reference(case, NativeAttention(pool, 1, case.scale, library), pool)


def test_a_second_load_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_kernels(tmp_path) is not None
    built = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    monkeypatch.setenv("CXX", "false")
    assert load_kernels(tmp_path) is not None
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == built


def test_processes_that_build_at_once_all_get_a_library(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from twostroke.kernels.cpu.build import Kernels, load_kernels; "
        "sys.exit(load_kernels(Path(sys.argv[1])) is None)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(build.__file__).parents[3])}
    builders = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], env=environment) for _ in range(3)]
    assert [builder.wait() for builder in builders] == [0, 0, 0]
    assert [path.suffix for path in tmp_path.iterdir()] == [".so"]


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_torch_serves_and_one_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    pool = torch.zeros(2, 1, 2, 1, 16, 8)
    with caplog.at_level(logging.WARNING):
        backend = choose_attention(pool, heads=1, scale=1.0, kernels=load_kernels(tmp_path))
    assert isinstance(backend, TorchAttention)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_compiler_that_does_not_know_the_machine_builds_a_plain_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "old-compiler"
    wrapper.write_text('#!/bin/sh\nfor a in "$@"; do case $a in -mavx*) exit 1;; esac; done\nexec c++ "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    library = load_kernels(tmp_path / "kernels")
    assert library is not None
    case = Case(
        {
            "kv_heads": 1,
            "groups": 3,
            "head_dim": 64,
            "block": 16,
            "dtype": torch.bfloat16,
            "spans": [(40, 1)],
            "seed": 2,
        }
    )
    pool = case.pool.clone()
    check_against_reference(case, NativeAttention(pool, case.heads, case.scale, library), pool)


def test_float16_is_rounded_as_torch_rounds_it(library: Kernels) -> None:
    """v goes to its slot untouched and comes back as an average of one: every half is read and written exactly."""
    halves = torch.arange(0x7C00, dtype=torch.int32).to(torch.int16).view(torch.float16)
    values = torch.cat([halves, -halves])[: 2 * 31 * 1024].view(-1, 1, 64)
    count = len(values)
    pool = torch.zeros(count, 1, 2, 1, 1, 64, dtype=torch.float16)
    batch = RaggedBatch(
        positions=torch.zeros(count, dtype=torch.int32),
        query_starts=tuple(range(count + 1)),
        context_lens=(1,) * count,
        block_tables=torch.arange(count, dtype=torch.int32)[:, None],
        write_slots=torch.arange(count),
        cosines=torch.ones(count, 32),
        sines=torch.zeros(count, 32),
    )
    step = NativeAttention(pool, 1, 1.0, library).begin(batch)
    k = torch.zeros_like(values)
    out = step.attend(0, step.store(0, k.clone(), k, values))
    assert torch.equal(out.view_as(values), values)
