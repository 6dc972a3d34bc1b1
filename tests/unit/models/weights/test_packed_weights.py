"""Workers of one host share packed weights: the same bytes as weights of their own, with a head or without."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from tests.unit.models import family_configs as families
from tests.unit.models.test_registry import SIZES, saved
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.linear import NativeLinears, PanelLinear
from twostroke.kernels.cpu.weights.arena import Arena
from twostroke.kernels.cpu.weights.packing import PANEL
from twostroke.kernels.products.linear import Linear
from twostroke.models.memory_needs import packed_weights as packed_weight_bytes
from twostroke.models.registry import read_spec
from twostroke.models.weights import packed_file, packed_weights
from twostroke.models.weights.packed_weights import PackedModel
from twostroke.models.weights.products import ModelWeights

CONFIGS = {
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gemma3": families.CONFIGS["gemma3"],
    "phi3": families.CONFIGS["phi3, long and partly rotated"],
    "gpt2": families.CONFIGS["gpt2"],
    "qwen2_moe": families.CONFIGS["qwen2_moe, some layers dense"],
    "deepseek_v2": families.CONFIGS["deepseek_v2, lite"],
    "deepseek_v3": families.CONFIGS["deepseek_v3"],
}


class NoProducts(Kernels):
    """Weights are packed alike on every CPU, and nothing is computed here."""

    def function(self, name: str, arguments: tuple[Any, ...], result: Any = None) -> Callable[..., Any]:
        return lambda *_: pytest.fail(f"{name} was called")

    def need(self, part: str) -> None:
        """Needs none, since it computes nothing."""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "share_in_large_pages", lambda region: 1.0)
    return tmp_path / "cache"


def make_linears(*, is_int8: bool = False) -> Callable[[Arena], NativeLinears]:
    kernels = NoProducts(ctypes.CDLL(None), "none", "none")
    return lambda arena: NativeLinears(kernels, None, is_int8=is_int8, arena=arena)


def packed(directory: Path, *, is_int8: bool = False) -> PackedModel:
    return PackedModel(directory, read_spec(directory), torch.bfloat16, is_int8, make_linears(is_int8=is_int8))


def panels(weights: ModelWeights) -> list[bytes]:
    linears: list[Linear] = []
    for layer in weights.layers:
        experts = () if layer.experts is None else layer.experts.table
        mlps = [*experts, *([] if layer.mlp is None else [layer.mlp])]
        linears += [layer.qkv, layer.attention_output, *(each for mlp in mlps for each in (mlp.inner, mlp.down))]
        linears += [] if layer.experts is None else [layer.experts.router]
    found = []
    for linear in [*linears, *([] if weights.head is None else [weights.head])]:
        assert isinstance(linear, PanelLinear)
        native = linear.native
        rows = -(-native.outputs * (2 if native.is_gated else 1) // PANEL) * PANEL
        found.append(ctypes.string_at(native.panels, rows * native.inputs * (1 if native.kind else 2)))
        if native.kind:
            found.append(ctypes.string_at(native.scales, 4 * rows * native.inputs // 64))
    return found


def plain(weights: ModelWeights) -> list[torch.Tensor]:
    norms = [norm for layer in weights.layers for norm in (layer.attention_norm.weight, layer.q_norm, layer.k_norm)]
    return [weights.embedding, weights.norm.weight, *(norm for norm in norms if norm is not None)]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_shared_weights_are_those_of_one_s_own(
    name: str, is_int8: bool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: PreTrainedConfig = CONFIGS[name]
    saved(model, tmp_path)
    of = packed(tmp_path, is_int8=is_int8)
    first, again, prefill = of.load(with_head=True), of.load(with_head=True), of.load(with_head=False)
    assert len(list((cache / "packed").glob("*.weights"))) == 1
    monkeypatch.setattr(packed_weights, "mapped", lambda path, write: None)
    own = of.load(with_head=True)
    for shared in (first, again):
        assert panels(shared) == panels(own)
        assert all(map(torch.equal, plain(shared), plain(own)))
    assert prefill.head is None
    assert panels(prefill) == panels(of.load(with_head=False))
    assert all(map(torch.equal, plain(prefill), plain(own)))


def test_other_weights_and_other_forms_have_files_of_their_own(tmp_path: Path, cache: Path) -> None:
    model = saved(CONFIGS["qwen3"], tmp_path)
    packed(tmp_path).load(with_head=True)
    packed(tmp_path, is_int8=True).load(with_head=True)
    assert len(list((cache / "packed").glob("*.weights"))) == 2
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(tmp_path)
    weights = packed(tmp_path).load(with_head=True)
    assert len(list((cache / "packed").glob("*.weights"))) == 3
    assert torch.equal(weights.norm.weight, model.model.norm.weight.bfloat16())


def test_nothing_keeps_the_model_s_own_files_mapped(tmp_path: Path) -> None:
    saved(CONFIGS["llama tied"], tmp_path)
    weights = packed(tmp_path).load(with_head=True)
    assert str(tmp_path / "model.safetensors") not in Path("/proc/self/maps").read_text(encoding="utf-8")
    del weights


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("is_int8", [False, True])
def test_the_bill_knows_the_size_of_the_file_to_the_byte(name: str, is_int8: bool, tmp_path: Path, cache: Path) -> None:
    saved(CONFIGS[name], tmp_path)
    model = packed(tmp_path, is_int8=is_int8)
    model.load(with_head=True)
    file = next((cache / "packed").glob("*.weights"))
    assert packed_weight_bytes(model.spec, is_int8=is_int8).total == file.stat().st_size
