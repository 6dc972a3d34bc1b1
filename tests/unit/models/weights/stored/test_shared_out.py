"""Ranks that share out quantised weights compute what one that has all of them does, with the file's numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen2MoeConfig

from tests.unit.kernels.stored_matrices import LAYOUTS
from tests.unit.models.decoders.test_native_transformer import logits_of, plain, prompt
from tests.unit.models.shares.test_share import NativeCollective, prefilled
from tests.unit.models.test_registry import saved
from tests.unit.models.weights.stored.coded_models import FORMATS, quantised
from tests.unit.models.weights.stored.gguf_models import SIZES, written
from tests.unit.models.weights.stored.test_coded import cache
from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.layout import Layout
from twostroke.models.checks.preflight import check_tensors
from twostroke.models.families.table import layouts_named
from twostroke.models.memory_needs import stored_weights
from twostroke.models.registry import read_spec
from twostroke.models.shares.share import layouts_of_share, mlp_unit_of, share_of
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.model_files import layouts_in

__all__ = ["cache"]

ORDERED = [name for name in FORMATS if "act-order" in name]
MODELS: Final[dict[str, tuple[PreTrainedConfig, str]]] = {
    **{name: (LlamaConfig(**SIZES), name) for name in FORMATS if name not in ORDERED},
    "llama": (LlamaConfig(**SIZES), "llama"),
    "llama tied": (LlamaConfig(**SIZES, tie_word_embeddings=True), "llama"),
    "qwen2": (Qwen2Config(**SIZES), "qwen2"),
    "qwen2_moe": (
        Qwen2MoeConfig(
            **SIZES,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=96,
        ),
        "qwen2moe",
    ),
}
"""Configs with the format of safetensors, or the architecture of GGUF, in which their weights are written.

Their MLPs have 96 columns: of three groups, the second of two ranks has two.
"""


def model_of(name: str, directory: Path) -> ModelSpec:
    config, kind = MODELS[name]
    if kind in FORMATS:
        saved(config, directory)
        quantised(directory, FORMATS[kind])
    else:
        written(config, kind, directory)
    return read_spec(directory)


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_have_the_logits_of_one(name: str, tmp_path: Path, kernels: Kernels) -> None:
    spec = model_of(name, tmp_path)
    tokens = prompt(37)
    truth = logits_of(plain(tmp_path, torch.float32), tokens)
    logits, _ = prefilled(tmp_path, tokens.tolist(), 2)
    torch.testing.assert_close(logits, truth[-1], rtol=2e-4, atol=2e-4)
    wide = (logits_of(plain(tmp_path, torch.bfloat16), tokens) - truth).abs()
    ranks = NativeCollective(tmp_path, kernels, 2)
    ours = ranks.logits([tokens], [0], list(range(len(tokens))))
    assert ours is not None
    assert (ours.float() - truth).abs().mean() < 4 * wide.mean(), "inputs rounded to int8 cost as much with one rank"
    layouts = layouts_in(tmp_path)
    assert layouts is not None
    billed = [stored_weights(share, layouts_named(layouts, spec)).total for share in ranks.shares]
    packed = [file.stat().st_size for file in (tmp_path / "cache" / "packed").glob("*.weights")]
    assert sorted(billed) == sorted(packed)


def test_inputs_that_groups_have_in_an_order_of_their_own_are_refused(tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    quantised(tmp_path, FORMATS["GPTQ with act-order"])
    with pytest.raises(ConfigError) as refusal:
        check_tensors(tmp_path, ModelConfig(model=str(tmp_path), decode_tp=2))
    assert str(refusal.value) == (
        "--tp 2: the groups of model.layers.0.self_attn.o_proj take their inputs from all over its 64 (g_idx), so that "
        "its columns cannot be shared out"
    )


def test_ranks_on_named_gpus_are_refused_before_a_worker_starts(tmp_path: Path) -> None:
    model_of("GPTQ", tmp_path)
    with pytest.raises(ConfigError, match=r"^--prefill-tp 2: quantised weights are shared out over ranks on CPUs only"):
        check_tensors(tmp_path, ModelConfig(model=str(tmp_path), prefill_tp=2, device="cuda"))
    check_tensors(tmp_path, ModelConfig(model=str(tmp_path), prefill_tp=2))
    check_tensors(tmp_path, ModelConfig(model=str(tmp_path), device="cuda"))


def spec_of(tmp_path: Path, width: int, attended: int) -> ModelSpec:
    saved(LlamaConfig(**SIZES | {"num_hidden_layers": 1}), tmp_path)
    return replace(read_spec(tmp_path), intermediate_size=width, head_dim=attended // SIZES["num_attention_heads"])


def test_mlps_are_cut_between_super_blocks_and_heads_that_end_amid_one_are_refused(tmp_path: Path) -> None:
    def layout_of(name: str) -> Layout:
        return LAYOUTS["Q4_K" if "o_proj" in name else "Q6_K"]

    spec = spec_of(tmp_path, 19 * 256, 1024)
    unit = mlp_unit_of(spec, layout_of, is_int8=False)
    shares = [share_of(spec, rank, 2, mlp_unit=unit) for rank in range(2)]
    assert [share.intermediate_size for share in shares] == [9 * 256, 10 * 256]
    for share in shares:
        assert layouts_of_share(layout_of, share)("model.layers.0.mlp.down_proj.weight") == LAYOUTS["Q6_K"]
        assert layouts_of_share(layout_of, share)("model.layers.0.self_attn.o_proj.weight") == LAYOUTS["Q4_K"]
    narrow = share_of(spec_of(tmp_path, 19 * 256, 768), 1, 2, mlp_unit=unit)
    with pytest.raises(ConfigError) as refusal:
        layouts_of_share(layout_of, narrow)("model.layers.0.self_attn.o_proj.weight")
    assert str(refusal.value) == (
        "--tp 2: the codes of model.layers.0.self_attn.o_proj belong together by 256 inputs, and rank 1 would have "
        "those from 384 to 767 of 768"
    )
    with pytest.raises(ConfigError, match="--tp 4: the model's 768 columns of its MLPs cannot be shared out by 256"):
        share_of(spec_of(tmp_path, 768, 1024), 0, 4, mlp_unit=unit)
