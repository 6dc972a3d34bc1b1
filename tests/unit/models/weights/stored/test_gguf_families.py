"""GGUF files of every family that has some: the tokens of transformers with the same numbers, and codes as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tests.unit.models.decoders.test_native_transformer import logits_of, native, plain, prompt
from tests.unit.models.family_configs import CONFIGS, MIXED, OSS, WINDOW, longrope
from tests.unit.models.test_families import Pages, greedy
from tests.unit.models.weights.stored.gguf_models import SIZES, written
from tests.unit.models.weights.stored.packed_sizes import billed_bytes, packed_bytes
from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu.build import Kernels
from twostroke.models.catalog.places import cache_dir
from twostroke.models.weights import packed_file
from twostroke.models.weights.stored.check import check_describes_itself, check_weights
from twostroke.models.weights.stored.gguf_names import ARCHITECTURES

SMALL: Final[dict[str, Any]] = SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GEMMA: Final[dict[str, Any]] = SMALL | {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 20}
EXPERTS: Final[dict[str, Any]] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: Final[dict[str, tuple[PreTrainedConfig, str]]] = {
    "gemma2": (Gemma2Config(**GEMMA), "gemma2"),
    "gemma3": (Gemma3TextConfig(**GEMMA, layer_types=MIXED), "gemma3"),
    "phi3": (Phi3Config(**SMALL), "phi3"),
    "phi3, long and partly rotated": (
        Phi3Config(
            **SMALL,
            rope_parameters=longrope(6) | {"partial_rotary_factor": 0.75},
            original_max_position_embeddings=256,
        ),
        "phi3",
    ),
    "mixtral": (MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2), "llama"),
    "qwen2_moe": (Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=96), "qwen2moe"),
    "qwen3_moe": (Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True), "qwen3moe"),
    "gpt_oss": (GptOssConfig(**OSS | {"hidden_size": 64, "intermediate_size": 96}), "gpt-oss"),
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "share_in_large_pages", lambda region: 1.0)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers_with_the_same_numbers(name: str, tmp_path: Path, kernels: Kernels) -> None:
    config, architecture = MODELS[name]
    written(config, architecture, tmp_path, meaning=tmp_path / "same numbers")
    check_weights(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "same numbers", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = prompt(70).tolist()
    expected = greedy(model, tokens, 12)
    for usable in (kernels, None):
        assert Pages(tmp_path, usable, "float32").answer(tokens, 12) == expected


@pytest.mark.parametrize("name", MODELS)
def test_codes_are_multiplied_as_they_are_and_the_bill_knows_their_size(
    name: str, tmp_path: Path, kernels: Kernels
) -> None:
    config, architecture = MODELS[name]
    types = ("MXFP4", "Q8_0") if name == "gpt_oss" else ("Q4_0", "Q8_0", "Q5_0")
    written(config, architecture, tmp_path, types)
    tokens = prompt(37)
    truth = logits_of(plain(tmp_path, torch.float32), tokens)
    wide = (logits_of(plain(tmp_path, torch.bfloat16), tokens) - truth).abs()
    ours = logits_of(native(tmp_path, kernels), tokens)
    assert (ours - truth).abs().mean() < 4 * wide.mean(), "inputs rounded to int8 cost no more than that"
    assert torch.equal(logits_of(native(tmp_path, kernels), tokens), ours), "a mapped file has what was packed"
    assert billed_bytes(tmp_path) == packed_bytes(tmp_path)


def test_every_architecture_is_tried_here_or_beside() -> None:
    assert {architecture for _, architecture in MODELS.values()} | {"qwen2", "qwen3"} == set(ARCHITECTURES)


def test_an_expert_that_the_file_lacks_is_named(tmp_path: Path) -> None:
    config, architecture = MODELS["mixtral"]
    written(config, architecture, tmp_path)
    MixtralConfig(**SIZES, num_local_experts=6).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"ffn_gate_inp|no tensor blk.0.ffn_gate_exps.weight with an expert 5"):
        plain(tmp_path, torch.float32)


def test_a_file_of_a_family_without_gguf_is_refused_by_its_architecture(tmp_path: Path) -> None:
    path = written(*MODELS["phi3"], tmp_path)
    path.write_bytes(path.read_bytes().replace(b"phi3", b"phi9"))
    CONFIGS["phi3"].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="architecture 'phi9' is not served from GGUF"):
        check_weights(tmp_path)


def test_a_file_that_says_too_little_of_its_config_is_not_served_alone(tmp_path: Path) -> None:
    path = written(*MODELS["gemma2"], tmp_path)
    check_describes_itself(path)
    path.write_bytes(path.read_bytes().replace(b"output_norm", b"rope_factor"))
    with pytest.raises(ConfigError, match=r"rope_factor.weight is only served with the model's config.json"):
        check_describes_itself(path)
