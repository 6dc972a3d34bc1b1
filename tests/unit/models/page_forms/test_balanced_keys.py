"""Balanced keys change no bit of what a model computes over plain pages, and bring pages of 8 bits nearer to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen3Config

from tests.unit.models.decoders.test_native_transformer import BLOCK, PAGES, Served, logits_of, native, prompt
from tests.unit.models.test_registry import SIZES, saved
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.products.linear import TorchLinears
from twostroke.kernels.torch_attention.gathered import TorchAttention
from twostroke.models.decoders.transformer import Transformer
from twostroke.models.page_forms.balanced_keys import balanced
from twostroke.models.registry import read_spec
from twostroke.models.spec import ModelSpec
from twostroke.models.weights import packed_weights
from twostroke.models.weights.files import TensorFiles
from twostroke.models.weights.products import take_products
from twostroke.models.weights.tensors import WeightSource


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """A model whose keys have a large bias in the fastest pair of channels, of which positions leave no mean."""
    saved(Qwen2Config(**SIZES), tmp_path)
    spec, path = read_spec(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(path)
    for layer in range(spec.layers):
        bias = tensors[f"model.layers.{layer}.self_attn.k_proj.bias"].view(spec.kv_heads, spec.head_dim)
        bias[:, :: spec.head_dim // 2] = 120.0
    save_file(tensors, path, {"format": "pt"})
    return tmp_path


def over(source: WeightSource, spec: ModelSpec, form: str) -> Served:
    pool = PagePool.empty(PAGES, form, spec.page_shape(BLOCK))
    weights = take_products(source, spec, with_head=True, linears=TorchLinears())
    return Served(spec, Transformer(spec, weights, TorchAttention(pool, spec.heads, spec.rules)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_bit_changes_over_plain_pages_and_int8_is_nearer_to_them(uneven: Path, dtype: torch.dtype) -> None:
    spec, tokens, name = read_spec(uneven), prompt(37), str(dtype).removeprefix("torch.")
    with TensorFiles(uneven, dtype) as files:
        sources = files, balanced(files, spec)
        keys = [each.take("model.layers.0.self_attn.k_proj.bias", spec.kv_heads * spec.head_dim) for each in sources]
        (plain, same), (far, near) = (
            [logits_of(over(source, spec, form), tokens) for source in sources] for form in (name, "int8")
        )
    assert keys[1].abs().max() < keys[0].abs().max() / 4
    assert torch.equal(same, plain)
    assert (near - plain).square().mean() < (far - plain).square().mean() / 2


def test_native_weights_are_balanced_alike_when_they_are_packed_and_when_they_are_found_packed(
    uneven: Path, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "balanced"))
    packed, found = (logits_of(native(uneven, kernels), prompt(37)) for _ in range(2))
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "as they are"))
    monkeypatch.setattr(packed_weights, "balanced", lambda source, *_, **__: source)
    assert torch.equal(packed, found)
    assert torch.equal(packed, logits_of(native(uneven, kernels), prompt(37)))


def test_weights_of_keys_that_have_no_bias_or_a_norm_stay_as_they_are(tmp_path: Path) -> None:
    saved(Qwen3Config(**SIZES, head_dim=16, attention_bias=True), tmp_path)
    with TensorFiles(tmp_path, torch.float32) as files:
        assert balanced(files, read_spec(tmp_path)) is files
