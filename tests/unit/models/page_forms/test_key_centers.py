"""The centers of keys are what their bias leaves on all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from tests.unit.models.test_registry import SIZES, YARN, saved
from twostroke.kernels import reference
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kv_cache.form import FORMS
from twostroke.models.page_forms.balanced_keys import key_centers
from twostroke.models.registry import read_spec
from twostroke.models.rope import MEAN_POSITIONS, rope_tables
from twostroke.models.weights.files import TensorFiles
from twostroke.page_forms.page_form import PageShape

WITH_BIAS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES),
    "llama": LlamaConfig(**SIZES, attention_bias=True, rope_parameters=YARN),
}
WITHOUT: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "qwen3 whose keys are normalised after their bias": Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
}


def centers_of(directory: Path) -> torch.Tensor | None:
    with TensorFiles(directory, torch.float32) as files:
        return key_centers(files, read_spec(directory))


@pytest.mark.parametrize("name", WITH_BIAS)
def test_centers_are_the_mean_of_the_bias_at_all_positions(name: str, tmp_path: Path) -> None:
    saved(WITH_BIAS[name], tmp_path)
    spec, stored, centers = read_spec(tmp_path), load_file(tmp_path / "model.safetensors"), centers_of(tmp_path)
    assert centers is not None
    angles = rope_tables(spec.ropes, MEAN_POSITIONS)
    for layer, found in enumerate(centers):
        bias = stored[f"model.layers.{layer}.self_attn.k_proj.bias"].view(spec.kv_heads, spec.head_dim)
        rotated = reference.rotate(bias.expand(MEAN_POSITIONS, -1, -1), *angles)
        torch.testing.assert_close(found, rotated.mean(0), rtol=2.0**-8, atol=1e-5)
    assert torch.equal(centers, centers.bfloat16().float())


@pytest.mark.parametrize("name", WITHOUT)
def test_keys_without_a_bias_that_rope_alone_changes_have_none(name: str, tmp_path: Path) -> None:
    saved(WITHOUT[name], tmp_path)
    assert centers_of(tmp_path) is None


def test_each_layers_keys_are_stored_less_that_layers_own_centers() -> None:
    shape = PageShape(layers=3, kv_heads=2, block=4, head_dim=8)
    centers = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(1)) * 10
    data = torch.zeros(2, FORMS["int8"].page_bytes(shape), dtype=torch.uint8)
    pool = PagePool.over(data, FORMS["int8"], shape, centers)
    keys = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(2))
    for layer in range(3):
        pool.write(keys, keys, layer, torch.arange(8))
        stored = pool.read(torch.arange(2), layer)[:, 0].transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(stored, keys - centers[layer], rtol=0, atol=0.2)
