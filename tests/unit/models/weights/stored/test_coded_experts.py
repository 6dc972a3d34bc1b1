"""Quantised experts, and rows that share a file's tensor: served as they are, with the bill of what they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, MixtralConfig, Phi3Config, PreTrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

from tests.unit.models.decoders.test_native_transformer import Served, logits_of, native, plain, prompt
from tests.unit.models.family_configs import longrope
from tests.unit.models.test_registry import our_logits, saved
from tests.unit.models.weights.stored.coded_models import FORMATS, Tensors, fp8_in_blocks, quantised
from tests.unit.models.weights.stored.gguf_models import SIZES
from tests.unit.models.weights.stored.packed_sizes import billed_bytes, packed_bytes
from twostroke.base.errors import UnsupportedModel
from twostroke.kernels.cpu.build import Kernels
from twostroke.models.catalog.places import cache_dir
from twostroke.models.weights import packed_file
from twostroke.models.weights.stored.check import check_weights

EXPERTS: Final[dict[str, Any]] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: Final[dict[str, PreTrainedConfig]] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=96),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "phi3, partly rotated": Phi3Config(
        **SIZES,
        pad_token_id=0,
        rope_parameters=longrope(6) | {"partial_rotary_factor": 0.75},
        original_max_position_embeddings=64,
    ),
}
DEEPSEEK: Final = DeepseekV3Config(
    **SIZES
    | {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    num_mtp_layers=0,
)
DEEPSEEK_FORMS: Final = {
    "FP8 in blocks of 128": fp8_in_blocks(128),
    "AWQ": FORMATS["AWQ"],
    "GPTQ with act-order": FORMATS["GPTQ with act-order"],
}
"""The first is that of DeepSeek's own files."""
SOME: Final = (
    "GPTQ, zeros",
    "GPTQ with act-order",
    "AWQ",
    "FP8 in blocks",
    "FP8 per tensor",
    "compressed int4",
    "compressed int8",
    "compressed MXFP4",
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "share_in_large_pages", lambda region: 1.0)


def written(model: str, form: str, directory: Path) -> Tensors:
    """Saves a model whose matrices, routers aside, are quantised; returns what its tensors stand for."""
    saved(MODELS[model], directory)
    return quantised(directory, FORMATS[form])


@pytest.mark.parametrize("form", SOME)
@pytest.mark.parametrize("model", MODELS)
def test_codes_are_multiplied_as_they_are_and_the_bill_knows_their_size(
    model: str, form: str, tmp_path: Path, kernels: Kernels
) -> None:
    meaning = written(model, form, tmp_path)
    saved(MODELS[model], tmp_path / "same numbers")
    save_file(meaning, tmp_path / "same numbers" / "model.safetensors")
    tokens = prompt(37)
    truth = our_logits(tmp_path / "same numbers", tokens)
    torch.testing.assert_close(our_logits(tmp_path, tokens), truth, rtol=1e-4, atol=1e-4)
    wide = (logits_of(plain(tmp_path, torch.bfloat16), tokens) - truth).abs()
    ours = logits_of(native(tmp_path, kernels), tokens)
    assert (ours - truth).abs().mean() < 4 * wide.mean(), "inputs rounded to int8 cost no more than that"
    assert torch.equal(logits_of(native(tmp_path, kernels), tokens), ours), "a mapped file has what was packed"
    assert billed_bytes(tmp_path) == packed_bytes(tmp_path)


@pytest.mark.parametrize("form", DEEPSEEK_FORMS)
def test_deepseek_v3_is_served_as_it_is_published(form: str, tmp_path: Path, kernels: Kernels) -> None:
    """A layer that predicts further tokens lies in the files, and the rows of latents and keys end within a block."""
    saved(DEEPSEEK, tmp_path)
    meaning = quantised(tmp_path, DEEPSEEK_FORMS[form])
    add_a_layer_that_predicts(tmp_path)
    check_weights(tmp_path)
    saved(DEEPSEEK, tmp_path / "same numbers")
    save_file(meaning, tmp_path / "same numbers" / "model.safetensors")
    truth = our_logits(tmp_path / "same numbers", prompt(37))
    wide = (logits_of(plain(tmp_path, torch.bfloat16), prompt(37)) - truth).abs()
    ours = (logits_of(native(tmp_path, kernels), prompt(37)) - truth).abs()
    assert ours.mean() < 4 * wide.mean(), "inputs rounded to int8 cost no more than that"
    assert billed_bytes(tmp_path) == packed_bytes(tmp_path)


def add_a_layer_that_predicts(directory: Path) -> None:
    """Writes the last layer once more behind itself, and says so in the config."""
    tensors = load_file(directory / "model.safetensors")
    last = {name: each for name, each in tensors.items() if name.startswith("model.layers.1.")}
    further = {name.replace("layers.1.", "layers.2."): each.clone() for name, each in last.items()}
    save_file(tensors | further, directory / "model.safetensors")
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}), encoding="utf-8")


@pytest.mark.parametrize("form", ["AWQ", "FP8 in blocks", "GPTQ with act-order"])
def test_a_row_is_the_same_bits_in_chunks_and_beside_others(form: str, tmp_path: Path, kernels: Kernels) -> None:
    """Experts of act-order have their inputs in orders of their own, and are multiplied one after the other."""
    written("qwen3_moe", form, tmp_path)
    served: Served = native(tmp_path, kernels)
    sequences = [prompt(length, seed=length) for length in (30, 3, 17)]
    alone = [logits_of(served, tokens)[-1] for tokens in sequences]
    together = served.logits(sequences, [0, 0, 0], [29, 32, 49])
    assert together is not None
    for row in range(3):
        assert torch.equal(together[row].float(), alone[row])


def test_codes_of_all_experts_in_one_tensor_are_refused_by_its_name(tmp_path: Path) -> None:
    saved(MODELS["qwen3_moe"], tmp_path, save_original_format=False)
    quantised(tmp_path, FORMATS["FP8 in blocks"])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=name):
        check_weights(tmp_path)
