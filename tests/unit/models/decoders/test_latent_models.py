"""DeepSeek V2 and V3: what their configs may ask for, what their files hold besides, what their pages and bills are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.models.decoders.test_native_transformer import BLOCK, Served, logits_of, native, plain, prompt
from tests.unit.models.family_configs import CONFIGS
from tests.unit.models.test_families import LONGEST, ODD, Pages, reference
from tests.unit.models.test_registry import our_logits
from tools.bill.bill import make_bill
from tools.bill.options import BillFlags, MemoryFlags, ModelFlags
from tools.bill.report import groups_grid
from twostroke.base.errors import ConfigError, UnsupportedModel
from twostroke.config import CacheConfig, ModelConfig, Role, WorkerConfig
from twostroke.engine.backends.cpu.runner import ModelRunner
from twostroke.engine.build import build_runner
from twostroke.engine.determinism import EXPANDED, NATIVE
from twostroke.kernels.attention.interface import AttentionBackend
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.models.decoders.choice import LoadOptions, load_model
from twostroke.models.decoders.native_transformer import NativeTransformer
from twostroke.models.registry import read_spec

V2, V3 = "deepseek_v2", "deepseek_v3"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        (V2, "norm_topk_prob", True),
        (V2, "topk_method", "noaux_tc"),
        (V2, "scoring_func", "sigmoid"),
        (V2, "attention_bias", True),
        (V2, "mlp_bias", True),
        (V2, "moe_layer_freq", 2),
        (V2, "num_key_value_heads", 2),
        (V2, "n_group", 3),
        (V2, "topk_group", 5),
        (V3, "topk_method", "greedy"),
        (V3, "scoring_func", "softmax"),
        (V3, "n_group", 12),
        (V3, "topk_group", 0),
        (V3, "num_experts_per_tok", 0),
    ],
)
def test_options_that_are_not_computed_are_refused_by_key(name: str, key: str, value: object, tmp_path: Path) -> None:
    config = CONFIGS[name].to_dict() | {key: value}
    type(CONFIGS[name])(**config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=key) as refusal:
        read_spec(tmp_path)
    assert "\n" not in refusal.value.message


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    reference(CONFIGS[V3], tmp_path)
    tokens = prompt(20)
    expected = our_logits(tmp_path, tokens)
    config = CONFIGS[V3].to_dict() | {"num_nextn_predict_layers": 1}
    type(CONFIGS[V3])(**config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    own = {name: each for name, each in tensors.items() if name.startswith("model.layers.2.")}
    further = {name.replace("layers.2.", "layers.3."): each + 1 for name, each in own.items()}
    further["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors | further, tmp_path / "model.safetensors")
    assert torch.equal(our_logits(tmp_path, tokens), expected)


@pytest.mark.parametrize("name", ["deepseek_v2, lite", V3])
def test_pages_have_the_same_bits_in_every_chunk_and_beside_others(name: str, tmp_path: Path, kernels: Kernels) -> None:
    reference(CONFIGS[name], tmp_path)
    tokens, beside = prompt(40), prompt(33, seed=5)
    (whole, whole_pool), (cut, cut_pool) = (bfloat16_pages(tmp_path, kernels) for _ in range(2))
    whole.logits([tokens], [0], None)
    for first, end in ((0, 7), (7, 8), (8, 27)):
        cut.logits([tokens[:end], beside[: end - 5]], [first, max(0, first - 5)], None)
    cut.logits([tokens], [27], None)
    pages = len(tokens) // BLOCK
    assert torch.equal(whole_pool.numbers[:pages], cut_pool.numbers[:pages])
    assert whole_pool.numbers[:pages].count_nonzero() > 0


def bfloat16_pages(
    directory: Path, kernels: Kernels, *, is_deterministic: bool = True, is_int8: bool = False
) -> tuple[Served, PagePool]:
    spec = read_spec(directory)
    pool = PagePool.empty(40, "bfloat16", spec.page_shape(BLOCK))
    backend: AttentionBackend = NativeAttention(pool, spec.heads, spec.rules, kernels)
    model = load_model(
        directory,
        spec,
        backend,
        kernels,
        LoadOptions(dtype=torch.bfloat16, is_int8=is_int8, is_deterministic=is_deterministic),
    )
    assert isinstance(model, NativeTransformer)
    assert model.expands_prompts != is_deterministic
    return Served(spec, model), pool


@pytest.mark.parametrize("name", ["deepseek_v2, whole dense, yarn", "deepseek_v3, whole dense, yarn"])
def test_long_chunks_are_expanded_and_as_near_to_the_truth_as_absorbed_ones(
    name: str, tmp_path: Path, kernels: Kernels
) -> None:
    reference(CONFIGS[name], tmp_path)
    tokens = prompt(40)
    truth = logits_of(plain(tmp_path, torch.float32), tokens)
    errors = []
    for is_deterministic in (True, False):
        served, _ = bfloat16_pages(tmp_path, kernels, is_deterministic=is_deterministic)
        assert served.logits([tokens[:7]], [0], None) is None
        found = served.logits([tokens], [7], list(range(33)))
        assert found is not None
        errors.append((found.float() - truth[7:]).abs())
    absorbed, expanded = errors
    assert not torch.equal(expanded, absorbed)
    assert expanded.mean() < 1.2 * absorbed.mean()


def test_short_chunks_beside_an_expanded_one_are_absorbed(tmp_path: Path, kernels: Kernels) -> None:
    reference(CONFIGS["deepseek_v3, whole dense, yarn"], tmp_path)
    (expanding, _), (absorbing, _) = (
        bfloat16_pages(tmp_path, kernels, is_deterministic=is_deterministic) for is_deterministic in (False, True)
    )
    short, long, last = prompt(9), prompt(38, seed=1), prompt(31, seed=2)
    rows = [8, 46, 77]
    together = expanding.logits([short, long, last], [0, 0, 0], rows)
    expected = absorbing.logits([short, long, last], [0, 0, 0], rows)
    assert together is not None
    assert expected is not None
    assert torch.equal(together[[0, 2]], expected[[0, 2]])
    assert not torch.equal(together[1], expected[1])


def test_rounded_weights_are_expanded_too(tmp_path: Path, kernels: Kernels) -> None:
    reference(CONFIGS["deepseek_v2, whole dense, yarn"], tmp_path)
    absorbing, expanding = (
        bfloat16_pages(tmp_path, kernels, is_deterministic=is_deterministic, is_int8=True)[0]
        for is_deterministic in (True, False)
    )
    expected, found = (logits_of(served, prompt(40)) for served in (absorbing, expanding))
    assert not torch.equal(found, expected)
    assert (found - expected).abs().mean() < 0.1 * expected.std()


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_worker_says_whether_prompts_of_latents_are_expanded(is_deterministic: bool, tmp_path: Path) -> None:
    reference(CONFIGS[V2], tmp_path)
    built = build_runner(worker(tmp_path, is_deterministic=is_deterministic), tmp_path)
    built.close()
    assert isinstance(built.runner, ModelRunner)
    assert built.runner.determinism == (NATIVE if is_deterministic else EXPANDED)


def test_deterministic_pages_have_the_same_bits_in_every_chunk(tmp_path: Path) -> None:
    reference(CONFIGS[V2], tmp_path)
    tokens = prompt(LONGEST - 20).tolist()
    whole, cut = (Pages(tmp_path, None, "float32", is_deterministic=True) for _ in range(2))
    expected = whole.prefill(tokens, (len(tokens),))
    assert torch.equal(cut.prefill(tokens, ODD), expected)
    assert torch.equal(cut.data, whole.data)


def test_int8_weights_stay_near_those_of_bfloat16(tmp_path: Path, kernels: Kernels) -> None:
    config = CONFIGS["deepseek_v3, whole dense, yarn"].to_dict() | {
        "hidden_size": 128,
        "qk_nope_head_dim": 64,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "v_head_dim": 64,
    }
    reference(type(CONFIGS[V3])(**config), tmp_path)
    exact, rounded = (logits_of(native(tmp_path, kernels, is_int8=is_int8), prompt(37)) for is_int8 in (False, True))
    assert not torch.equal(exact, rounded)
    assert (rounded - exact).abs().mean() < 0.1 * exact.std()


def worker(directory: Path, *, is_deterministic: bool = False, **cache: Any) -> WorkerConfig:
    model = ModelConfig(model=str(directory), dtype="bfloat16", device="cpu", deterministic=is_deterministic)
    cached = CacheConfig(kv_cache_memory_bytes=1 << 20, **cache)
    return WorkerConfig(role=Role.DECODE, worker_id="d", model=model, cache=cached)


def test_a_worker_and_the_bill_count_pages_of_latents_alike(tmp_path: Path) -> None:
    reference(CONFIGS[V2], tmp_path)
    built = build_runner(worker(tmp_path), tmp_path)
    built.close()
    model = ModelFlags(model=str(tmp_path), dtype="bfloat16")
    bill = make_bill(BillFlags(model=model, memory=MemoryFlags(kv_cache_memory_bytes=1 << 20)))
    layers, numbers = 3, 32 + 8
    assert built.model.page_bytes == bill.chosen.size.page_bytes == 16 * layers * numbers * 2
    assert set(bill.forms) == {"bfloat16", "float16", "float32"}
    assert "latents of 32 and a rotated key of 8, 3 layers, 1 x 40" in str(groups_grid(bill))


def test_forms_that_latents_cannot_have_are_refused_when_a_worker_starts(tmp_path: Path) -> None:
    reference(CONFIGS[V2], tmp_path)
    with pytest.raises(ConfigError, match="--kv-format int8 is not served for models whose pages hold latents"):
        build_runner(worker(tmp_path, kv_format="int8"), tmp_path)
    flags = ModelFlags(model=str(tmp_path), dtype="bfloat16")
    with pytest.raises(ConfigError, match="--kv-format int8"):
        make_bill(BillFlags(model=flags, memory=MemoryFlags(kv_format="int8")))
