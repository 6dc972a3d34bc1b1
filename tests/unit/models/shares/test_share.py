"""Ranks that each compute a share of a model give what one that computes all of it does."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.unit.models.decoders.test_native_transformer import PAGES, WIDE, Served, logits_of, native, plain, prompt
from tests.unit.models.family_configs import CONFIGS
from tests.unit.models.test_families import BLOCK, LONGEST, ODD, Pages, one_thread, reference
from tests.unit.models.test_registry import saved
from twostroke.base.errors import ConfigError
from twostroke.kernels.choice import choose_attention, grouped_pool
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kv_cache.form import Conversion, JointForm, KvForm, page_form
from twostroke.models.decoders.choice import LoadOptions, load_model
from twostroke.models.decoders.native_transformer import NativeTransformer
from twostroke.models.registry import read_spec
from twostroke.models.rope import rope_tables
from twostroke.models.shares.share import share_of
from twostroke.models.shares.shared_out import pages_of_share, shares_in
from twostroke.ranks.collectives import RankSums
from twostroke.ranks.group import RankGroup, create_memory
from twostroke.scheduler.batch import Batch

__all__ = ["one_thread"]

PATIENCE_S = 60.0


class Meeting:
    """Ranks that are threads of this process."""

    def __init__(self, ranks: int) -> None:
        self.parts: list[torch.Tensor | None] = [None] * ranks
        self.barrier = threading.Barrier(ranks)

    def exchanged(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = part
        self.barrier.wait(PATIENCE_S)
        found = [each for each in self.parts if each is not None]
        self.barrier.wait(PATIENCE_S)
        return found


class ThreadRank:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting = meeting
        self.rank = rank

    native = None

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Each is told by the test."""
        return nullcontext()

    def close(self) -> None:
        """Nothing is left."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(part, dtype=torch.float32)
        for each in self.meeting.exchanged(self.rank, part):
            total += each
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank gets the logits here, so that each says what it found."""
        return torch.cat(self.meeting.exchanged(self.rank, part), dim=1)


class RankPages(Pages):
    """One rank's share of a model over its part of the pages."""

    def __init__(self, directory: Path, data: torch.Tensor, meeting: Meeting, rank: int, form: JointForm) -> None:
        self.data = data
        spec = shares_in(directory, read_spec(directory), form.processes, is_int8=False)[rank]
        assert spec.share is not None
        (own,), _ = pages_of_share([data], form, spec.share)
        pool = grouped_pool([own], form.inner, [spec.page_shape(BLOCK)], torch.float32)
        backend = choose_attention(pool, heads=spec.heads, rules=spec.rules, kernels=None, dtype=torch.float32)
        ranks = ThreadRank(meeting, rank)
        self.model = load_model(directory, spec, backend, None, LoadOptions(dtype=torch.float32), ranks)
        self.angles = rope_tables(spec.ropes, LONGEST)


def prefilled(directory: Path, tokens: list[int], ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits behind a prompt, and its pages."""
    form = page_form(f"float32/{ranks}")
    assert isinstance(form, JointForm)
    data = torch.zeros(LONGEST // BLOCK, form.page_bytes(read_spec(directory).page_shape(BLOCK)), dtype=torch.uint8)
    meeting = Meeting(ranks)
    pages = [RankPages(directory, data, meeting, rank, form) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as threads:
        (logits, *_) = threads.map(lambda rank: pages[rank].prefill(tokens, ODD), range(ranks))
    return logits, data


SHARING_HEADS = ("qwen2, windows above", "phi3", "qwen2_moe", "gpt_oss", "deepseek_v3", "gpt2")
"""Some that four ranks can compute; of two of them they share key-value heads, and of one latents."""


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in CONFIGS), *((name, 4) for name in SHARING_HEADS)])
def test_ranks_have_the_logits_and_pages_of_one_that_computes_all(name: str, ranks: int, tmp_path: Path) -> None:
    reference(CONFIGS[name], tmp_path)
    tokens = prompt(90).tolist()
    alone = Pages(tmp_path, None, "float32")
    expected = alone.prefill(tokens, ODD)
    logits, data = prefilled(tmp_path, tokens, ranks)
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
    shape = read_spec(tmp_path).page_shape(BLOCK)
    conversion = Conversion(KvForm(f"float32/{ranks}"), KvForm("float32"), shape, has_pieces=False)
    for page, own in zip(data, alone.data, strict=True):
        whole = torch.zeros_like(own)
        convert_page(conversion, page, whole)
        torch.testing.assert_close(whole.view(torch.float32), own.view(torch.float32), rtol=1e-4, atol=1e-4)


def refused(name: str, ranks: int, tmp_path: Path) -> str:
    saved(CONFIGS[name], tmp_path)
    with pytest.raises(ConfigError) as refusal:
        share_of(read_spec(tmp_path), 0, ranks)
    return str(refusal.value)


def test_a_model_that_ranks_do_not_divide_is_refused_with_the_number_that_they_do_not_divide(tmp_path: Path) -> None:
    assert refused("phi3", 3, tmp_path) == "--tp 3 does not divide the model's 4 attention heads"


class NativeCollective:
    """Ranks that compute natively, each on a thread, and meet in the memory that processes share."""

    def __init__(self, directory: Path, kernels: Kernels, ranks: int, *, is_int8: bool = False) -> None:
        spec = read_spec(directory)
        self.shares = shares_in(directory, spec, ranks, is_int8=is_int8)
        self.options = LoadOptions(dtype=torch.bfloat16, is_int8=is_int8)
        fd, slot_bytes = create_memory(kernels, ranks, 64 << 10)
        groups = [RankGroup(kernels, os.dup(fd), rank, ranks, slot_bytes) for rank in range(ranks)]
        os.close(fd)
        self.served = [self._served(directory, kernels, RankSums(each, spec.vocab_size), each) for each in groups]
        self.threads = ThreadPoolExecutor(ranks)

    def _served(self, directory: Path, kernels: Kernels, sums: RankSums, group: RankGroup) -> Served:
        spec = self.shares[group.rank]
        pool = PagePool.empty(PAGES, "bfloat16", spec.page_shape(BLOCK))
        backend = NativeAttention(pool, spec.heads, spec.rules, kernels)
        model = load_model(directory, spec, backend, kernels, self.options, sums)
        assert isinstance(model, NativeTransformer)
        return Served(spec, model)

    def logits(
        self,
        sequences: list[torch.Tensor],
        starts: list[int],
        sampled: list[int] | None,
        adapters: Sequence[tuple[Any, ...]] | None = None,
    ) -> torch.Tensor | None:
        """`adapters`: those of the sequences, as each rank has prepared them."""
        of_ranks = adapters or [()] * len(self.served)
        steps = [
            self.threads.submit(each.logits, sequences, starts, sampled, adapters=own)
            for each, own in zip(self.served, of_ranks, strict=True)
        ]
        found = [step.result() for step in steps]
        assert found[1:] == [None] * (len(found) - 1), "the first rank alone draws"
        return found[0]


@pytest.mark.parametrize("name", [name for name in CONFIGS if "deepseek" not in name or "whole dense" in name])
def test_native_ranks_are_nearer_to_the_truth_than_torch(name: str, tmp_path: Path, kernels: Kernels) -> None:
    reference(CONFIGS[name], tmp_path)
    tokens = prompt(37)
    truth = logits_of(plain(tmp_path, torch.float32), tokens)
    theirs = (logits_of(plain(tmp_path, torch.bfloat16), tokens) - truth).abs()
    logits = NativeCollective(tmp_path, kernels, 2).logits([tokens], [0], list(range(len(tokens))))
    assert logits is not None
    assert (logits.float() - truth).abs().mean() < theirs.mean()


def test_ranks_round_the_same_numbers_to_int8_as_one_that_has_all(tmp_path: Path, kernels: Kernels) -> None:
    """MLPs of 192 columns are three groups of 64: rank 1 has two of them."""
    reference(LlamaConfig(**WIDE), tmp_path)
    tokens = prompt(37)
    exact = logits_of(native(tmp_path, kernels), tokens)
    rounded = logits_of(native(tmp_path, kernels, is_int8=True), tokens)
    ranks = NativeCollective(tmp_path, kernels, 2, is_int8=True)
    assert [share.intermediate_size for share in ranks.shares] == [64, 128]
    logits = ranks.logits([tokens], [0], list(range(len(tokens))))
    assert logits is not None
    assert (logits - rounded).abs().mean() < (rounded - exact).abs().mean() / 4


@pytest.mark.parametrize("name", ["mistral, window", "qwen2_moe", "deepseek_v3"])
def test_native_ranks_give_a_row_the_same_bits_in_chunks_and_beside_others(
    name: str, tmp_path: Path, kernels: Kernels
) -> None:
    reference(CONFIGS[name], tmp_path)
    tokens, other = prompt(30), prompt(23, seed=1)  # so short that latents are not expanded
    whole = NativeCollective(tmp_path, kernels, 2).logits([tokens], [0], [29])
    ranks = NativeCollective(tmp_path, kernels, 2)
    assert ranks.logits([tokens[:17]], [0], None) is None
    assert ranks.logits([tokens[:29], other], [17, 0], None) is None
    chunked = ranks.logits([tokens, other], [29, 22], [0, 1])
    assert whole is not None
    assert chunked is not None
    assert torch.equal(chunked[0], whole[0])
