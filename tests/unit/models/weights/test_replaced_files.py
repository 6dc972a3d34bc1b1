"""A model whose files are replaced: while it loads, after it was packed, and while it is served."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, Qwen2Config

from tests.unit.models.test_registry import SIZES, saved
from tests.unit.models.weights.stored.coded_models import FORMATS, quantised
from tests.unit.models.weights.stored.gguf_models import SIZES as CODED_SIZES
from twostroke.base import cache_key as keys
from twostroke.base.errors import ConfigError
from twostroke.engine.adapters.model_adapters import ModelAdapters
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.linear import NativeLinears
from twostroke.kernels.cpu.weights.arena import Arena
from twostroke.models.adapters.peft import Adapter, LowRank
from twostroke.models.decoders.choice import load_weights
from twostroke.models.file_versions import FileVersions
from twostroke.models.generic.checkpoint import load_checkpoint
from twostroke.models.registry import read_spec
from twostroke.models.weights import packed_file
from twostroke.models.weights.digest import weights_digest
from twostroke.models.weights.packed_weights import PackedModel

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_file, "share_in_large_pages", lambda region: 1.0)
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    saved(Qwen2Config(**SIZES), tmp_path / "model")
    return tmp_path / "model"


class NoProducts(Kernels):
    """Weights are packed, and nothing is computed."""

    def function(self, name: str, arguments: tuple[Any, ...], result: Any = None) -> Callable[..., Any]:
        return lambda *_: pytest.fail(f"{name} was called")

    def need(self, part: str) -> None:
        """Needs none, since it computes nothing."""


def packed(directory: Path) -> PackedModel:
    kernels = NoProducts(ctypes.CDLL(None), "none", "none")

    def make_linears(arena: Arena) -> NativeLinears:
        return NativeLinears(kernels, None, is_int8=False, arena=arena)

    return PackedModel(directory, read_spec(directory), torch.bfloat16, False, make_linears)


def packed_files(cache: Path) -> set[Path]:
    return set((cache / "packed").glob("*.weights"))


def other_weights(directory: Path) -> bytes:
    tensors = {name: tensor + 1 for name, tensor in load_file(directory / WEIGHTS).items()}
    save_file(tensors, directory / "other", {"format": "pt"})
    content = (directory / "other").read_bytes()
    (directory / "other").unlink()
    return content


def write_over(path: Path, content: bytes) -> None:
    with path.open("r+b") as file:
        file.write(content)


def rename_over(path: Path, content: bytes) -> None:
    path.with_name("new").write_bytes(content)
    path.with_name("new").rename(path)


@pytest.mark.parametrize("replace_file", [write_over, rename_over])
def test_weights_copied_over_while_they_are_packed_are_refused_and_nothing_stays_under_the_old_name(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, replace_file: Callable[[Path, bytes], None]
) -> None:
    new, old, opened = other_weights(model), (model / WEIGHTS).read_bytes(), PackedModel._open

    def replaced_first(self: PackedModel) -> Any:
        monkeypatch.setattr(PackedModel, "_open", opened)
        replace_file(model / WEIGHTS, new)  # after the digest, before the weights are read
        return opened(self)

    monkeypatch.setattr(PackedModel, "_open", replaced_first)
    with pytest.raises(ConfigError, match=r"model\.safetensors changed while it was read"):
        packed(model).load(with_head=True)
    assert not packed_files(cache)
    replace_file(model / WEIGHTS, old)
    weights = packed(model).load(with_head=True)
    assert torch.equal(weights.norm.weight, load_file(model / WEIGHTS)["model.norm.weight"].bfloat16())


def test_vectors_are_not_read_of_newer_files_than_the_packed_matrices(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(model).load(with_head=True)
    new, opened = other_weights(model), PackedModel._open

    def replaced_first(self: PackedModel) -> Any:
        rename_over(model / WEIGHTS, new)
        return opened(self)

    monkeypatch.setattr(PackedModel, "_open", replaced_first)
    with pytest.raises(ConfigError, match="changed while it was read"):
        packed(model).load(with_head=True)


def test_a_digest_is_of_the_file_that_was_seen_before_or_there_is_none(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, new = FileVersions.now(model), other_weights(model)
    rename_over(model / WEIGHTS, new)
    with pytest.raises(ConfigError, match="changed while it was read"):
        weights_digest(versions)
    (model / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="changed while it was read"):
        weights_digest(versions)


def repaired(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_a_quantised_model_whose_config_is_repaired_is_packed_anew(tmp_path: Path, cache: Path) -> None:
    directory = tmp_path / "gptq"
    saved(LlamaConfig(**CODED_SIZES), directory)
    quantised(directory, FORMATS["GPTQ, zeros"])
    packed(directory).load(with_head=True)
    (before,) = packed_files(cache)
    repaired(directory)
    packed(directory).load(with_head=True)
    (after,) = packed_files(cache) - {before}
    assert before.read_bytes() != after.read_bytes(), "the zeros mean something else"


INPUTS: dict[str, Callable[[PackedModel], PackedModel]] = {
    "spec": lambda model: replace(model, spec=replace(model.spec, norm_epsilon=1e-3)),
    "dtype": lambda model: replace(model, dtype=torch.float16),
    "rounding": lambda model: replace(model, is_int8=True),
}


@pytest.mark.parametrize("name", [*INPUTS, "weights", "config", "code", "library"])
def test_the_name_of_packed_weights_depends_on(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = packed(model)
    before = one._path(FileVersions.now(model))
    if name == "weights":
        write_over(model / WEIGHTS, other_weights(model))
    elif name == "config":
        (model / "config.json").write_text("{}", encoding="utf-8")
    elif name == "code":
        monkeypatch.setattr(keys, "_source_digest", lambda program, code: b"repaired")
    elif name == "library":
        monkeypatch.setattr(keys, "version", lambda library: "99.0")
    else:
        one = INPUTS[name](one)
    assert one._path(FileVersions.now(model)) != before


def test_row_factors_are_those_of_the_weights_that_were_loaded(model: Path) -> None:
    spec = read_spec(model)
    tensors = load_file(model / WEIGHTS)
    for layer in range(spec.layers):  # so uneven that keys are balanced
        bias = tensors[f"model.layers.{layer}.self_attn.k_proj.bias"].view(spec.kv_heads, spec.head_dim)
        bias[:, :: spec.head_dim // 2] = 120.0
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    b, a = torch.ones(spec.heads * spec.head_dim, 1).numpy(), torch.ones(1, spec.hidden_size).numpy()
    adapter = Adapter(b"0" * 16, 1, 1.0, {(0, "q_proj"): LowRank(a, b)})
    adapters = ModelAdapters(model, spec, torch.bfloat16, linears=None)
    for name in tensors:
        tensors[name] = torch.zeros_like(tensors[name])
    rename_over(model / WEIGHTS, b"no weights at all")
    prepared = adapters.prepare(adapter)
    assert float(adapters._row_factors[0, "q_proj"].max()) > 1
    assert prepared is not None


@pytest.mark.parametrize("is_generic", [False, True])
def test_weights_that_are_served_do_not_change_when_their_files_are_written_over(
    is_generic: bool, tmp_path: Path
) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    spec = read_spec(tmp_path)

    def loaded() -> list[torch.Tensor]:
        if is_generic:
            return list(load_checkpoint(tmp_path, torch.float32, with_head=True)[0].parameters())
        weights = load_weights(tmp_path, spec, torch.float32, with_head=True)
        assert isinstance(weights.embedding, torch.Tensor)
        return [weights.embedding, weights.norm.weight, *(layer.attention_norm.weight for layer in weights.layers)]

    used, before = loaded(), loaded()
    assert str(tmp_path / WEIGHTS) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    write_over(tmp_path / WEIGHTS, other_weights(tmp_path))
    assert all(map(torch.equal, used, before))
