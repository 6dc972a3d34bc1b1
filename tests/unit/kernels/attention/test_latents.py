"""Attention over pages of latents: native kernels against plain loops, and rows that depend on themselves alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.pools.whole_pool import pool_over
from twostroke.base.errors import ConfigError
from twostroke.kernels import reference
from twostroke.kernels.attention.interface import AttentionBackend, RaggedBatch
from twostroke.kernels.attention.rules import AttentionRule
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.torch_attention.aligned import AlignedAttention
from twostroke.kernels.torch_attention.gathered import TorchAttention
from twostroke.kv_cache.form import FORMS, page_form
from twostroke.models.families.table import FAMILIES
from twostroke.models.rope import rope_tables
from twostroke.models.spec import RopeSpec
from twostroke.page_forms.page_form import PageShape

LAYERS, LAYER = 3, 1
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of random tokens, whose pages lie in a random order in one pool."""

    shape: PageShape
    heads: int
    dtype: torch.dtype
    lengths: tuple[int, ...]
    form: str = ""
    pool: PagePool = field(init=False)

    def __post_init__(self) -> None:
        form = FORMS[self.form or str(self.dtype).removeprefix("torch.")]
        data = torch.zeros(sum(map(self._blocks, self.lengths)) + 1, form.page_bytes(self.shape), dtype=torch.uint8)
        pool = pool_over(data, form, self.shape, self.dtype)
        assert isinstance(pool, PagePool)
        pool.numbers.fill_(float("nan"))  # what nobody wrote must not be read
        object.__setattr__(self, "pool", pool)

    @property
    def rule(self) -> AttentionRule:
        return AttentionRule(scale=self.shape.head_dim**-0.5)

    def rows(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q [length, heads, D] and k [length, 1, D] of one sequence."""
        draw = torch.Generator().manual_seed(sequence)
        fused = torch.randn(self.lengths[sequence], self.heads + 1, self.shape.head_dim, generator=draw)
        return fused[:, 1:].to(self.dtype), fused[:, :1].to(self.dtype)

    def batch(self, spans: Sequence[tuple[int, int, int]]) -> RaggedBatch:
        """Returns the step that computes tokens first .. end - 1 of some sequences."""
        order = torch.randperm(len(self.pool.numbers), generator=torch.Generator().manual_seed(3)).int()
        widest = max(map(self._blocks, self.lengths))
        firsts = [sum(map(self._blocks, self.lengths[:sequence])) for sequence in range(len(self.lengths))]
        tables = torch.stack([order[firsts[s] : firsts[s] + widest].resize_(widest) for s, *_ in spans])
        positions = [torch.arange(first, end) for _, first, end in spans]
        slots = [
            tables[row].long()[at // self.shape.block] * self.shape.block + at % self.shape.block
            for row, at in enumerate(positions)
        ]
        rope = RopeSpec(kind="default", inverse_frequencies=tuple(0.7**i for i in range(self.pool.rope_dim // 2)))
        cosines, sines = rope_tables((rope,), max(self.lengths))
        at = torch.cat(positions)
        return RaggedBatch(
            positions=at.int(),
            query_starts=(0, *torch.tensor([len(each) for each in positions]).cumsum(0).tolist()),
            context_lens=tuple(end for *_, end in spans),
            block_tables=tables.contiguous(),
            write_slots=torch.cat(slots),
            cosines=cosines[at],
            sines=sines[at],
        )

    def step(self, backend: AttentionBackend, spans: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Stores and attends; returns [T, heads * latent_dim]."""
        q, k = (
            torch.cat([self.rows(sequence)[which][first:end] for sequence, first, end in spans]) for which in (0, 1)
        )
        step = backend.begin(self.batch(spans))
        return step.attend(LAYER, step.store(LAYER, q.clone(), k, k[..., : self.pool.value_dim]))

    def whole(self) -> list[tuple[int, int, int]]:
        return [(sequence, 0, length) for sequence, length in enumerate(self.lengths)]

    def _blocks(self, length: int) -> int:
        return -(-length // self.shape.block)


def native(of: Sequences, kernels: Kernels, team: Team | None = None) -> NativeAttention:
    return NativeAttention(of.pool, of.heads, (of.rule,) * LAYERS, kernels, team, of.dtype)


@given(
    heads=st.sampled_from([1, 2, 4, 7, 16, 32]),
    latent_dim=st.sampled_from([8, 20, 32, 40, 64]),
    rope=st.sampled_from([4, 8, 10]),
    block=st.sampled_from([1, 4, 16, 32]),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(["float32", "bfloat16", "float16"]),
    lengths=st.lists(st.sampled_from([1, 2, 5, 16, 33, 255, 256, 257, 300]), min_size=1, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_native_kernels_equal_plain_loops(
    kernels: Kernels,
    heads: int,
    latent_dim: int,
    rope: int,
    block: int,
    dtype: torch.dtype,
    form: str,
    lengths: list[int],
) -> None:
    shape = PageShape(LAYERS, 1, block, latent_dim + rope, latent_dim)
    ours, theirs = (Sequences(shape, heads, dtype, tuple(lengths), form) for _ in range(2))
    found = ours.step(native(ours, kernels), ours.whole())
    step = TorchAttention(theirs.pool, heads, (theirs.rule,) * LAYERS).begin(theirs.batch(theirs.whole()))
    q, k = (torch.cat([theirs.rows(sequence)[which] for sequence in range(len(lengths))]) for which in (0, 1))
    rotated = step.store(LAYER, q, k, k[..., :latent_dim])
    expected = reference.paged_attention(rotated, theirs.pool, LAYER, theirs.batch(theirs.whole()), theirs.rule.scale)
    tolerance = max(TOLERANCE[dtype], TOLERANCE[getattr(torch, form)])
    torch.testing.assert_close(found, expected.flatten(1), rtol=tolerance, atol=tolerance)
    used = ~theirs.pool.numbers.isnan()
    assert torch.equal(used, ~ours.pool.numbers.isnan())
    torch.testing.assert_close(ours.pool.numbers[used], theirs.pool.numbers[used], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [4, 32])
def test_a_row_has_the_same_bits_in_every_chunk_beside_others_and_on_threads(
    kernels: Kernels, heads: int, dtype: torch.dtype
) -> None:
    shape = PageShape(LAYERS, 1, 16, 72, 64)
    alone = Sequences(shape, heads, dtype, (600,))
    expected = alone.step(native(alone, kernels), alone.whole())
    chunked = Sequences(shape, heads, dtype, (600,))
    ends = (0, 1, 8, 41, 43, 300, 555, 599, 600)
    parts = [chunked.step(native(chunked, kernels), [(0, first, end)]) for first, end in itertools.pairwise(ends)]
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(pages_of(chunked), pages_of(alone))
    beside = Sequences(shape, heads, dtype, (600, 33, 500))
    team = Team(kernels, (0, 1, 2))
    with team.step(borrows=False):
        beside.step(native(beside, kernels, team), [(0, 0, 600), (2, 0, 499)])
        last = beside.step(native(beside, kernels, team), [(2, 499, 500), (0, 599, 600), (1, 0, 33)])
    assert torch.equal(last[1], expected[-1])


def pages_of(of: Sequences) -> torch.Tensor:
    """Returns the layer's numbers of the first sequence, in order."""
    table = of.batch([(0, 0, of.lengths[0])]).block_tables[0].long()
    return of.pool.numbers[table, LAYER].nan_to_num()


def test_deterministic_torch_gives_a_row_the_same_bits_in_every_chunk() -> None:
    shape = PageShape(LAYERS, 1, 16, 40, 32)
    whole, cut = (Sequences(shape, 4, torch.float32, (70,)) for _ in range(2))
    expected = whole.step(AlignedAttention(whole.pool, 4, (whole.rule,) * LAYERS), whole.whole())
    backend = AlignedAttention(cut.pool, 4, (cut.rule,) * LAYERS)
    parts = [cut.step(backend, [(0, first, end)]) for first, end in ((0, 33), (33, 34), (34, 70))]
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize(("layers", "token_bytes"), [(27, 31_104), (61, 70_272)])
def test_a_token_of_deepseek_takes_as_many_bytes_as_its_latents_and_rotated_keys(layers: int, token_bytes: int) -> None:
    shape = PageShape(layers, 1, 16, 576, 512)
    assert shape.dims == (layers, 1, 1, 16, 576)
    assert FORMS["bfloat16"].page_bytes(shape) == 16 * token_bytes
    assert {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"} <= set(FAMILIES)


@pytest.mark.parametrize("form", ["int8", "fp8_e4m3", "int4", "int4+1xbfloat16"])
def test_forms_with_scales_are_refused_for_latents_by_name(form: str) -> None:
    shape = PageShape(3, 1, 16, 40, 32)
    with pytest.raises(ConfigError, match=r"--kv-format .* is not served for models whose pages hold latents: use bfl"):
        pool_over(torch.zeros(1, 8, dtype=torch.uint8), page_form(form), shape, torch.bfloat16)
