"""Every tensor of a model's files is computed with, known as harmless, refused by name, or named in a warning."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, LlamaConfig

from tests.unit.models.family_configs import CONFIGS, OSS
from tests.unit.models.generic_configs import GENERIC
from tests.unit.models.test_registry import SIZES, saved
from tests.unit.models.weights.stored import gguf_models
from tests.unit.models.weights.stored.coded_models import FORMATS, quantised, with_expert_blocks
from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig
from twostroke.models.checks import preflight
from twostroke.models.checks.preflight import check_model, check_tensors
from twostroke.models.weights.stored.tensor_header import read_headers

Tensors = dict[str, torch.Tensor]
TIED: Final = LlamaConfig(**SIZES, tie_word_embeddings=True)
HEAD: Final = "lm_head.weight"
TABLE: Final = "model.embed_tokens.weight"
LAYER: Final = "model.layers.1."


def change(directory: Path, tensors: Callable[[Tensors], Any] = lambda _: None, **values: Any) -> None:
    """Changes the tensors of a model in place, and values of its config."""
    found = load_file(directory / "model.safetensors")
    tensors(found)
    save_file(found, directory / "model.safetensors", {"format": "pt"})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | values))


def add(**named: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name.replace("__", "."): tensor for name, tensor in named.items()})


def checked(directory: Path) -> str | None:
    return check_tensors(directory, ModelConfig(model=str(directory)))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_of_each_family_has_no_tensor_left(name: str, tmp_path: Path) -> None:
    saved(CONFIGS[name], tmp_path)
    assert checked(tmp_path) is None


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused_by_name(tmp_path: Path) -> None:
    saved(TIED, tmp_path)
    change(tmp_path, lambda tensors: tensors.update({HEAD: tensors[TABLE].clone()}))
    assert checked(tmp_path) is None
    change(tmp_path, lambda tensors: tensors[HEAD][-1, -1].add_(1))
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight.*Set tie_word"):
        checked(tmp_path)
    change(tmp_path, tie_word_embeddings=False)
    assert checked(tmp_path) is None


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_heads_that_families_call_differently_are_compared_too(kind: str, tmp_path: Path) -> None:
    saved(CONFIGS[kind], tmp_path)
    table, head = {"gpt2": ("transformer.wte", "lm_head"), "gpt_neox": ("gpt_neox.embed_in", "embed_out")}[kind]

    def differ(tensors: Tensors) -> None:
        tensors[f"{head}.weight"] = tensors[f"{table}.weight"] + 1

    change(tmp_path, differ, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match="differs from"):
        checked(tmp_path)


def test_a_head_of_another_type_than_its_embedding_is_refused(tmp_path: Path) -> None:
    saved(TIED, tmp_path)
    change(tmp_path, lambda tensors: tensors.update({HEAD: tensors[TABLE].to(torch.float16)}))
    with pytest.raises(ConfigError, match="differs from"):
        checked(tmp_path)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("self_attn.q_proj.bias", 64),
        ("mlp.down_proj.bias", 64),
        ("self_attn.q_norm.weight", 16),
        ("self_attn.sinks", 4),
        ("pre_feedforward_layernorm.weight", 64),
        ("mlp.experts.0.gate_proj.weight", 64),
    ],
)
def test_what_a_layer_has_beyond_its_config_is_refused_by_name(name: str, shape: int, tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    change(tmp_path, lambda tensors: tensors.update({LAYER + name: torch.ones(shape)}))
    with pytest.raises(ConfigError, match=rf"have tensor {LAYER}{name}, which the model of config\.json"):
        checked(tmp_path)


def test_layers_beyond_those_of_the_config_are_refused_but_for_those_that_predict_tokens(tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    change(tmp_path, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"tensors model\.layers\.1\.input_layernorm\.weight.* and \d+ more"):
        checked(tmp_path)
    change(tmp_path, num_nextn_predict_layers=1)
    assert checked(tmp_path) is None


def test_experts_beyond_those_of_the_config_are_refused_in_tensors_of_all_of_them(tmp_path: Path) -> None:
    for name in ("plain", "coded"):
        saved(GptOssConfig(**OSS | {"hidden_size": 64, "intermediate_size": 96}), tmp_path / name)
    with_expert_blocks(tmp_path / "coded")

    def more(tensors: Tensors) -> None:
        experts = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." in name}
        assert experts, "all experts of a layer are in one tensor"
        tensors.update({name: torch.cat((tensor, tensor[:1])) for name, tensor in experts.items()})

    for name in ("plain", "coded"):
        assert checked(tmp_path / name) is None
        change(tmp_path / name, more)
        with pytest.raises(ConfigError, match=r"mlp\.experts\.\w+ has \d+ experts, those of config\.json are \d+"):
            checked(tmp_path / name)


def test_a_bias_of_a_tied_head_is_refused_by_name(tmp_path: Path) -> None:
    saved(TIED, tmp_path)
    change(tmp_path, add(lm_head__bias=torch.ones(3)))
    with pytest.raises(ConfigError, match=r"have tensor lm_head\.bias"):
        checked(tmp_path)


def test_what_says_nothing_of_an_answer_is_harmless(tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    harmless = {
        f"{LAYER}self_attn.rotary_emb.inv_freq": torch.ones(8),
        f"{LAYER}self_attn.k_proj.k_scale": torch.ones(1),
        f"{LAYER}self_attn.kv_scale": torch.ones(1),
        f"{LAYER}self_attn.rotary_emb.cos_cached": torch.ones(8),
        f"{LAYER}mlp.down_proj.input_scale": torch.ones(1),
        f"{LAYER}self_attn.q_proj.bias": torch.zeros(64),
    }
    change(tmp_path, lambda tensors: tensors.update(harmless))
    assert checked(tmp_path) is None


def test_tensors_of_other_modules_are_named_at_each_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(preflight, "_check_apart", lambda directory, model: check_tensors(directory, model) or "")
    model = tmp_path / "model"
    saved(LlamaConfig(**SIZES), model)
    change(model, add(value_head__weight=torch.ones(3)))
    with caplog.at_level(logging.WARNING):
        for starts in (1, 2):
            check_model(model, ModelConfig(model=str(model)))
            assert caplog.text.count("nothing reads tensor value_head.weight") == starts


def test_a_generic_model_is_looked_through_too(tmp_path: Path) -> None:
    saved(GENERIC["opt"], tmp_path)
    assert checked(tmp_path) is None
    change(tmp_path, add(value_head__weight=torch.ones(3)))
    assert "value_head.weight" in (checked(tmp_path) or "")
    change(tmp_path, add(model__decoder__layers__1__fc1__gate=torch.ones(3)))
    with pytest.raises(ConfigError, match=r"tensor model\.decoder\.layers\.1\.fc1\.gate"):
        checked(tmp_path)


def test_a_gguf_file_is_looked_through_too(tmp_path: Path) -> None:
    gguf_models.written(LlamaConfig(**gguf_models.SIZES), "llama", tmp_path)
    assert checked(tmp_path) is None
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(ConfigError, match=r"output\.weight differs from token_embd\.weight"):
        checked(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_model_is_looked_through_too(name: str, tmp_path: Path) -> None:
    saved(LlamaConfig(**gguf_models.SIZES), tmp_path)
    quantised(tmp_path, FORMATS[name])
    assert checked(tmp_path) is None
    change(tmp_path, lambda tensors: tensors.update({f"{LAYER}self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(ConfigError, match=r"q_norm\.weight"):
        checked(tmp_path)


def test_blocks_of_experts_are_looked_through_too(tmp_path: Path) -> None:
    saved(GptOssConfig(**OSS | {"hidden_size": 64, "intermediate_size": 96}), tmp_path)
    with_expert_blocks(tmp_path)
    assert checked(tmp_path) is None


def shards(directory: Path, *, is_indexed: bool) -> None:
    """Lets two files have different tensors of each name; the index, if there is one, means the second one."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, directory / "a.safetensors", {"format": "pt"})
    save_file(tensors, directory / "b.safetensors", {"format": "pt"})
    if is_indexed:
        index = {"weight_map": dict.fromkeys(tensors, "b.safetensors")}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_index_says_which_of_several_files_is_meant(tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    shards(tmp_path, is_indexed=True)
    assert {tensor.path.name for tensor in read_headers(tmp_path).values()} == {"b.safetensors"}
    assert checked(tmp_path) is None
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"has model\.safetensors beside model\.safetensors\.index\.json"):
        checked(tmp_path)


def test_tensors_of_one_name_in_several_files_are_refused_without_an_index(tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    shards(tmp_path, is_indexed=False)
    with pytest.raises(ConfigError, match=r"is in a\.safetensors and in b\.safetensors"):
        checked(tmp_path)


def test_a_link_beside_the_models_file_may_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is where the original form in a cache of the hub was deleted."""
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(preflight, "_check_apart", lambda directory, model: checked(directory) or "")
    saved(LlamaConfig(**SIZES), tmp_path / "model")
    (tmp_path / "model" / "consolidated.safetensors").symlink_to(tmp_path / "nothing")
    check_model(tmp_path / "model", ModelConfig(model=str(tmp_path / "model")))


def test_copies_beside_the_models_one_file_are_not_read(tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, tmp_path / "consolidated.safetensors")
    assert checked(tmp_path) is None
