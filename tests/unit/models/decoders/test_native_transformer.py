"""One native call per step gives what torch's operations give, rounded less often."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from tests.trials.bench.kernels.bench_linear import products_of
from tests.unit.models import test_deterministic as steady
from tests.unit.models.family_configs import CONFIGS
from tests.unit.models.test_registry import SIZES, saved
from twostroke.base.errors import ConfigError
from twostroke.engine.adapters.model_adapters import added
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.torch_attention.gathered import TorchAttention
from twostroke.kv_cache.form import Conversion, KvForm
from twostroke.models.decoders.choice import LoadOptions, load_model, load_weights
from twostroke.models.decoders.native_transformer import NativeTransformer
from twostroke.models.decoders.transformer import Model, Transformer
from twostroke.models.registry import read_spec
from twostroke.models.rope import rope_tables
from twostroke.models.spec import ModelSpec
from twostroke.observability.profiler import KERNELS, KernelRecord, KernelRecords

WIDE = SIZES | {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}

MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama wide": LlamaConfig(**WIDE),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen2_moe": CONFIGS["qwen2_moe"],
    "deepseek_v3": CONFIGS["deepseek_v3, whole dense, yarn"],
}
BLOCK, PAGES = 4, 40


@dataclass(frozen=True)
class Served:
    """A model over a pool of its own; sequence s has pages 10 s to 10 s + 9."""

    spec: ModelSpec
    model: Model

    def logits(
        self,
        sequences: list[torch.Tensor],
        starts: list[int],
        sampled: list[int] | None,
        records: KernelRecords | None = None,
        adapters: tuple[Any, ...] = (),
    ) -> torch.Tensor | None:
        """Returns the logits of one step that computes each sequence from its start on."""
        positions = [torch.arange(start, len(s)) for s, start in zip(sequences, starts, strict=True)]
        counts = torch.tensor([0, *map(len, positions)]).cumsum(0)
        cosines, sines = rope_tables(self.spec.ropes, 64)
        at = torch.cat(positions)
        batch = RaggedBatch(
            positions=at.int(),
            query_starts=tuple(counts.tolist()),
            context_lens=tuple(map(len, sequences)),
            block_tables=torch.arange(10 * len(sequences), dtype=torch.int32).view(-1, 10),
            write_slots=torch.cat([10 * BLOCK * index + p for index, p in enumerate(positions)]),
            cosines=cosines[at],
            sines=sines[at],
            kernels=records,
            added=added(adapters, counts.tolist()),
        )
        tokens = torch.cat([s[start:] for s, start in zip(sequences, starts, strict=True)]).int()
        return self.model.forward(tokens, batch, None if sampled is None else torch.tensor(sampled))


def native(directory: Path, kernels: Kernels, *, is_int8: bool = False, with_head: bool = True) -> Served:
    spec = read_spec(directory)
    pool = PagePool.empty(PAGES, "bfloat16", spec.page_shape(BLOCK))
    backend = NativeAttention(pool, spec.heads, spec.rules, kernels)
    model = load_model(
        directory, spec, backend, kernels, LoadOptions(dtype=torch.bfloat16, is_int8=is_int8, with_head=with_head)
    )
    assert isinstance(model, NativeTransformer)
    return Served(spec, model)


def plain(directory: Path, dtype: torch.dtype) -> Served:
    spec = read_spec(directory)
    pool = PagePool.empty(PAGES, str(dtype).removeprefix("torch."), spec.page_shape(BLOCK))
    weights = load_weights(directory, spec, dtype, with_head=True)
    return Served(spec, Transformer(spec, weights, TorchAttention(pool, spec.heads, spec.rules)))


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(131, (length,), generator=torch.Generator().manual_seed(seed))


def logits_of(served: Served, tokens: torch.Tensor) -> torch.Tensor:
    logits = served.logits([tokens], [0], list(range(len(tokens))))
    assert logits is not None
    return logits.float()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_nearer_to_the_truth_than_those_of_torch(name: str, tmp_path: Path, kernels: Kernels) -> None:
    saved(MODELS[name], tmp_path)
    tokens = prompt(37)
    truth = logits_of(plain(tmp_path, torch.float32), tokens)
    theirs = (logits_of(plain(tmp_path, torch.bfloat16), tokens) - truth).abs()
    ours = (logits_of(native(tmp_path, kernels), tokens) - truth).abs()
    assert ours.mean() < theirs.mean()
    assert ours.max() < 1.5 * theirs.max()


def test_int8_weights_stay_near_the_truth(tmp_path: Path, kernels: Kernels) -> None:
    saved(MODELS["llama wide"], tmp_path)
    tokens = prompt(37)
    truth = logits_of(plain(tmp_path, torch.float32), tokens)
    exact, rounded = (logits_of(native(tmp_path, kernels, is_int8=is_int8), tokens) for is_int8 in (False, True))
    assert not torch.equal(exact, rounded)
    assert (rounded - truth).abs().mean() < 0.1 * truth.std()


@pytest.mark.parametrize("name", ["llama biased", "qwen3", "qwen2_moe", "deepseek_v3"])
def test_a_sequence_is_the_same_bits_in_chunks_and_beside_others(name: str, tmp_path: Path, kernels: Kernels) -> None:
    saved(MODELS[name], tmp_path)
    served = native(tmp_path, kernels)
    sequences = [prompt(length, seed=length) for length in (30, 3, 17)]
    alone = [logits_of(served, tokens)[-1] for tokens in sequences]
    assert served.logits([tokens[: len(tokens) // 2] for tokens in sequences], [0, 0, 0], None) is None
    rest = [len(tokens) - len(tokens) // 2 for tokens in sequences]
    ends = (torch.tensor(rest).cumsum(0) - 1).tolist()
    together = served.logits(sequences, [len(tokens) // 2 for tokens in sequences], [ends[2], ends[0], ends[1]])
    assert together is not None
    for row, sequence in enumerate((2, 0, 1)):
        assert torch.equal(together[row], alone[sequence])


def test_a_worker_without_head_writes_the_same_pages(tmp_path: Path, kernels: Kernels) -> None:
    saved(MODELS["llama"], tmp_path)
    tokens = prompt(21)
    headless, whole = native(tmp_path, kernels, with_head=False), native(tmp_path, kernels)
    assert headless.logits([tokens], [0], None) is None
    whole.logits([tokens], [0], [20])
    pools = [served.model._backend.pool.numbers for served in (headless, whole)]  # type: ignore[attr-defined]  # what it wrote
    assert torch.equal(*pools)
    assert pools[0].any()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_profile_has_every_kernel_with_its_time_and_work_and_changes_no_bit(
    name: str, tmp_path: Path, kernels: Kernels
) -> None:
    saved(MODELS[name], tmp_path)
    served, records = native(tmp_path, kernels), KernelRecords()
    sequences, begin_ns = [prompt(9), prompt(5)], time.monotonic_ns()
    logits = served.logits(sequences, [8, 2], [3], records)
    end_ns = time.monotonic_ns()
    assert logits is not None
    plain = served.logits(sequences, [8, 2], [3])
    assert plain is not None
    assert torch.equal(logits, plain)
    found = [(KERNELS[row[4]], row) for row in KernelRecord.iter_unpack(records.packed())]
    norms = ["head norm"] if name == "qwen3" else []
    layer = ["norm", "qkv", *norms, "rope and store", "attention", "output", "norm", "gate and up", "down"]
    assert [kind for kind, _ in found] == ["embedding", *layer * served.spec.layers, "norm", "head"]
    times = [at for _, row in found for at in row[:2]]
    assert [begin_ns, *times, end_ns] == sorted([begin_ns, *times, end_ns])
    spec = served.spec
    assert {row[2:4] for kind, row in found if kind == "attention"} == {
        (2.0 * 2 * (9 + 5) * spec.kv_heads * spec.head_dim, 4.0 * (9 + 3 + 4 + 5) * spec.heads * spec.head_dim)
    }
    products = products_of(spec)
    for kind, row in found:
        if kind in products:
            outputs, inputs = products[kind]
            rows = 1 if row[5] == spec.layers - 1 and kind != "qkv" else 4
            assert row[2:4] == (2.0 * outputs * inputs, 2.0 * outputs * inputs * rows), kind
            assert row[6] == rows


def test_int8_weights_without_their_kernels_are_refused_by_name(tmp_path: Path) -> None:
    saved(MODELS["llama"], tmp_path)
    spec = read_spec(tmp_path)
    backend = TorchAttention(PagePool.empty(1, "bfloat16", spec.page_shape(BLOCK)), spec.heads, 1.0)
    with pytest.raises(ConfigError, match="--weights int8"):
        load_model(tmp_path, spec, backend, None, LoadOptions(dtype=torch.bfloat16, is_int8=True))


def test_each_layer_of_one_call_stores_and_reads_pages_in_its_own_form(tmp_path: Path, kernels: Kernels) -> None:
    """Keys of the middle layer depend on the exact first one alone: its numbers are those of exact pages, in 4 bits."""
    saved(steady.DEEP, tmp_path)
    prompt, chunk = [torch.arange(64) * 7 % 131], [steady.Chunk(0, 0, 64)]
    mixed, exact = (
        steady.Served(tmp_path, f"native bfloat16{pages}", kernels)
        for pages in (", pages of int4 with exact layers", ", blocks of 16")
    )
    logits, near = mixed.step(prompt, chunk), exact.step(prompt, chunk)
    name = mixed.form.name
    conversion = Conversion(KvForm("bfloat16"), KvForm(name, "bfloat16"), mixed.shape, has_pieces=True)
    first, middle, last = mixed.form.parts(mixed.shape)
    for block in range(4):
        stored, expected = mixed.pages[block], torch.empty_like(mixed.pages[block])
        convert_page(conversion, exact.pages[block], expected)
        assert torch.equal(stored[: middle.bytes.stop], expected[: middle.bytes.stop])
        is_same = torch.equal(stored[last.bytes], expected[last.bytes])
        assert is_same == (block == 0), "the middle layer reads earlier blocks in 4 bits, and its own exact"
    assert first.form.name == last.form.name == "bfloat16"
    assert 0 < (logits - near).square().mean() < 0.1 * near.square().mean()
