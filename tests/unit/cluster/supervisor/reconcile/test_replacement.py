"""Only other weights of the same model may take its place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig

from cluster.supervisor.reconcile import replacement
from cluster.supervisor.reconcile.replacement import check_replacement
from tests.unit.models.test_registry import SIZES, saved
from twostroke.base.errors import ConfigError
from twostroke.base.tokenizer_file import tokenizer_field
from twostroke.config import ModelConfig
from twostroke.models.checks.preflight import check_tensors
from twostroke.models.weights.stored.check import check_weights

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "_name_or_path": "a/b", "torch_dtype": "float32"}


@pytest.fixture(autouse=True)
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are checked in this process: one that loads torch takes seconds, and `test_preflight` starts some."""

    def check(directory: Path, model: ModelConfig) -> None:
        check_weights(directory)
        check_tensors(directory, model)

    monkeypatch.setattr(replacement, "check_model", check)


def whole(path: Path, **config: str) -> Path:
    """A small model with all its tensors."""
    saved(LlamaConfig(**SIZES), path)
    (path / "tokenizer.json").write_text("{}")
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | config))
    return path


def directory(path: Path, config: object = CONFIG, tokenizer: str = "{}") -> str:
    """Files that are refused before anybody looks for tensors."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(tokenizer)
    save_file({"weight": np.zeros(4, np.float32)}, path / "model.safetensors")
    return str(path)


def test_a_fine_tune_may_take_the_place_of_its_base(tmp_path: Path) -> None:
    base, tuned = whole(tmp_path / "base"), whole(tmp_path / "tuned", _name_or_path="c", torch_dtype="bfloat16")
    check_replacement(ModelConfig(model=str(base)), str(base), str(tuned))
    check_replacement(ModelConfig(model=str(base)), str(base), "")


def test_weights_without_a_tensor_are_refused_before_a_worker_is_touched(tmp_path: Path) -> None:
    base, tuned = whole(tmp_path / "base"), whole(tmp_path / "tuned")
    tensors = load_file(tuned / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    del tensors[name]
    save_file(tensors, tuned / "model.safetensors")
    for now, wanted in ((base, str(tuned)), (tuned, "")):
        with pytest.raises(ConfigError, match=name):
            check_replacement(ModelConfig(model=str(base)), str(now), wanted)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(
            lambda path: directory(path, CONFIG | {"hidden_size": 65}), "hidden_size is 65, not 64", id="another shape"
        ),
        pytest.param(lambda path: directory(path, tokenizer="{ }"), "another tokenizer.json", id="another tokenizer"),
        pytest.param(lambda path: directory(path, ["a"]), "config.json holds no object", id="a config that is a list"),
        pytest.param(lambda path: str(path / "x" / "y" / "z"), "is not a directory here", id="no such directory"),
        pytest.param(lambda path: "some/model", "is not on this machine", id="a model that was not fetched"),
        pytest.param(lambda path: "paced:", "one of them is a paced model", id="a paced model"),
    ],
)
def test_what_is_no_other_weights_of_this_model_is_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], str], message: str
) -> None:
    base = directory(tmp_path / "base")
    with pytest.raises(ConfigError, match=message):
        check_replacement(ModelConfig(model=base), base, spoil(tmp_path / "wanted"))


@pytest.mark.parametrize("wanted", ["paced:weights=2,vocab=77", "paced:weights=2,step_ms=1"])
def test_a_paced_model_may_change_nothing_but_its_weights(wanted: str) -> None:
    check_replacement(ModelConfig(model="paced:"), "paced:", "paced:weights=2")
    with pytest.raises(ConfigError, match="only weights=N may differ"):
        check_replacement(ModelConfig(model="paced:"), "paced:", wanted)


def test_a_model_whose_directory_is_gone_can_be_replaced(tmp_path: Path) -> None:
    base = str(whole(tmp_path / "base"))
    check_replacement(ModelConfig(model=base), str(tmp_path / "gone"), str(whole(tmp_path / "third")))
    with pytest.raises(ConfigError, match="is not a directory here"):
        check_replacement(ModelConfig(model=base), str(tmp_path / "gone"), str(tmp_path / "gone too"))


def test_a_directory_whose_tokenizer_was_replaced_is_not_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers keep theirs, and refuse every worker that loads another one: nobody would serve any more."""
    monkeypatch.setattr(replacement, "check_model", lambda *_: None)  # it is not about tensors
    base, tuned = whole(tmp_path / "base"), whole(tmp_path / "tuned")
    loaded = [f"llama;{tokenizer_field(base)};x"] * 3
    served = ModelConfig(model=str(base))
    for wanted in ("", str(base), str(tuned)):
        check_replacement(served, str(base), wanted, loaded)
    for path in (base, tuned):
        (path / "tokenizer.json").write_text("{ }")
    replaced = f"llama;{tokenizer_field(base)};x"
    for wanted in ("", str(base), str(tuned)):
        with pytest.raises(ConfigError, match="than the workers have loaded"):
            check_replacement(served, str(base), wanted, [*loaded, replaced])
    check_replacement(served, str(base), "", [replaced, replaced, *loaded[:1]])


def test_a_directory_that_is_gone_or_lacks_a_file_is_not_loaded_again(tmp_path: Path) -> None:
    base = directory(tmp_path / "base")
    (tmp_path / "base" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="weights \\(other formats"):
        check_replacement(ModelConfig(model=base), base, "")
    with pytest.raises(ConfigError, match="is not a directory here"):
        check_replacement(ModelConfig(model=base), str(tmp_path / "gone"), "")


def test_weights_that_are_cut_short_are_refused_before_a_worker_loads_them(tmp_path: Path) -> None:
    base, tuned = directory(tmp_path / "base"), directory(tmp_path / "tuned")
    os.truncate(tmp_path / "tuned" / "model.safetensors", 20)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        check_replacement(ModelConfig(model=base), base, tuned)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    base, tuned = directory(tmp_path / "base"), directory(tmp_path / "tuned")
    (tmp_path / "tuned" / "tokenizer.json").unlink()
    (tmp_path / "tuned" / "tokenizer.json").mkdir()
    (tmp_path / "tuned" / "vocab.json").write_text("{}")
    with pytest.raises(ConfigError, match="json cannot be read"):
        check_replacement(ModelConfig(model=base), base, tuned)
