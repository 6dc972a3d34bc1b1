"""GGUF files are served as they are: with the numbers of llama.cpp, and with logits near those of the same numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from tests.unit.models.decoders.test_native_transformer import logits_of, native, plain, prompt
from tests.unit.models.test_registry import saved as model_of
from tests.unit.models.weights.stored.gguf_models import MIXED, SIZES, random_blocks, written
from tests.unit.models.weights.stored.packed_sizes import billed_bytes, packed_bytes
from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.products.stored import StoredMatrix
from twostroke.models.catalog.places import cache_dir
from twostroke.models.file_versions import FileVersions
from twostroke.models.weights import packed_file
from twostroke.models.weights.digest import weights_digest
from twostroke.models.weights.stored.check import check_gguf
from twostroke.models.weights.stored.formats import open_weights
from twostroke.models.weights.stored.gguf import READERS
from twostroke.models.weights.stored.gguf_file import TYPES, read_gguf
from twostroke.models.weights.stored.gguf_header import HeaderReader
from twostroke.models.weights.stored.model_files import layouts_in

MODELS: dict[str, tuple[PreTrainedConfig, str]] = {
    "llama": (LlamaConfig(**SIZES), "llama"),
    "llama tied": (LlamaConfig(**SIZES, tie_word_embeddings=True), "llama"),
    "llama biased": (LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), "llama"),
    "qwen2": (Qwen2Config(**SIZES), "qwen2"),
    "qwen3": (Qwen3Config(**SIZES, head_dim=32), "qwen3"),
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_dir() / "kernels")
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "share_in_large_pages", lambda region: 1.0)


@pytest.mark.parametrize("name", [name for name, kind in TYPES.items() if kind.layout])
def test_numbers_are_those_of_llama_cpp(name: str) -> None:
    layout, theirs_type = TYPES[name].layout, GGMLQuantizationType[name]
    assert layout is not None
    block, block_bytes = GGML_QUANT_SIZES[theirs_type]
    blocks = random_blocks(6, 512 // block, block_bytes)
    numbers = READERS[name](torch.from_numpy(blocks))
    ours = StoredMatrix(layout, 6, 512, lambda: numbers).dense().numpy()
    theirs = quants.dequantize(blocks.reshape(6, -1), theirs_type)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_near_those_of_the_same_numbers(name: str, tmp_path: Path, kernels: Kernels) -> None:
    config, architecture = MODELS[name]
    written(config, architecture, tmp_path)
    tokens = prompt(37)
    truth = logits_of(plain(tmp_path, torch.float32), tokens)
    wide = (logits_of(plain(tmp_path, torch.bfloat16), tokens) - truth).abs()
    ours = logits_of(native(tmp_path, kernels), tokens)
    assert (ours - truth).abs().mean() < 4 * wide.mean(), "inputs rounded to int8 cost no more than that"
    again = logits_of(native(tmp_path, kernels), tokens)
    assert torch.equal(again, ours), "a mapped file has what was packed"


@pytest.mark.parametrize("name", ["llama biased", "qwen3"])
def test_tensors_are_as_the_model_has_them(name: str, tmp_path: Path) -> None:
    config, architecture = MODELS[name]
    state = model_of(config, tmp_path / "plain").state_dict()
    written(config, architecture, tmp_path / "file", ("F32",))
    with open_weights(tmp_path / "file", torch.float32) as files:
        for key, tensor in state.items():
            assert torch.equal(files.take(key, *tensor.shape), tensor), key


def test_a_file_that_gives_no_heads_of_keys_has_as_many_as_of_queries(tmp_path: Path) -> None:
    config = LlamaConfig(**(SIZES | {"num_key_value_heads": SIZES["num_attention_heads"]}))
    state = model_of(config, tmp_path / "plain").state_dict()
    path = written(config, "llama", tmp_path / "file", ("F32",), omits_kv_heads=True)
    check_gguf(path)
    with open_weights(path.parent, torch.float32) as files:
        for key in (name for name in state if ".k_proj" in name):
            assert torch.equal(files.take(key, *state[key].shape), state[key]), key


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("types", [MIXED, ("Q4_0",), ("F16",), ("BF16", "Q8_0")])
def test_the_bill_knows_the_size_of_the_packed_file(
    name: str, types: tuple[str, ...], tmp_path: Path, kernels: Kernels
) -> None:
    config, architecture = MODELS[name]
    written(config, architecture, tmp_path, types)
    native(tmp_path, kernels)
    assert billed_bytes(tmp_path) == packed_bytes(tmp_path)


def test_another_file_has_another_digest(tmp_path: Path) -> None:
    config, architecture = MODELS["qwen3"]
    written(config, architecture, tmp_path)
    before = weights_digest(FileVersions.now(tmp_path))
    written(config, architecture, tmp_path, ("Q8_0",))
    assert weights_digest(FileVersions.now(tmp_path)) != before


def test_int8_weights_of_quantised_files_are_refused(tmp_path: Path, kernels: Kernels) -> None:
    config, architecture = MODELS["qwen3"]
    written(config, architecture, tmp_path)
    with pytest.raises(ConfigError, match="quantised already"):
        native(tmp_path, kernels, is_int8=True)


def test_of_a_vocabulary_only_its_length_is_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_token_list(["a", "", "bc"])
    writer.add_token_types([1, 1, 6])
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.ones((3, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = HeaderReader(tmp_path / "model.gguf")
    assert [len(header.fields[f"tokenizer.ggml.{name}"].data) for name in ("tokens", "token_type")] == [1, 1]
    file = read_gguf(tmp_path / "model.gguf")
    assert [file.facts[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "eos_token_id")] == [3, 3, 2]
    assert file.tensors["token_embd.weight"].shape == (3, 32)


def test_two_files_in_a_directory_are_refused(tmp_path: Path) -> None:
    config, architecture = MODELS["qwen3"]
    path = written(config, architecture, tmp_path)
    (tmp_path / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match=r"several GGUF files \(model.gguf, other.gguf\)"):
        layouts_in(tmp_path)
