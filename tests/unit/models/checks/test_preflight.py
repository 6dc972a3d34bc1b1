"""Checkpoints that cannot be served are refused in one line before a worker starts, of families and generic ones."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.unit.models.family_configs import CONFIGS
from tests.unit.models.generic_configs import GENERIC
from tests.unit.models.test_registry import SIZES, saved
from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig
from twostroke.models.catalog.places import locate
from twostroke.models.checks.preflight import check_model, check_tensors
from twostroke.models.weights.stored.check import check_weights

KINDS: Final = {"llama": LlamaConfig(**SIZES), "opt": GENERIC["opt"]}
LAYERS: Final = {"llama": "model.layers.1.", "opt": "model.decoder.layers.1."}
UP: Final = {"llama": "mlp.up_proj.weight", "opt": "fc1.weight"}
EMBEDDING: Final = {"llama": "model.embed_tokens.weight", "opt": "model.decoder.embed_tokens.weight"}

Damage = Callable[[Path, str], None]


def _tensors(change: Callable[[dict[str, torch.Tensor], str], Mapping[str, torch.Tensor] | None]) -> Damage:
    """Changes the tensors, in place or by what is returned."""

    def do(directory: Path, kind: str) -> None:
        tensors = load_file(directory / "model.safetensors")
        changed = change(tensors, kind)
        save_file(dict(changed or tensors), directory / "model.safetensors", {"format": "pt"})

    return do


def _up(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Changes the first matrix of the last MLP."""

    def of(tensors: dict[str, torch.Tensor], kind: str) -> None:
        name = LAYERS[kind] + UP[kind]
        tensors[name] = change(tensors[name]).contiguous()

    return _tensors(of)


def _without(part: str) -> Damage:
    def of(tensors: dict[str, torch.Tensor], _kind: str) -> Mapping[str, torch.Tensor]:
        kept = {name: tensor for name, tensor in tensors.items() if part not in name}
        assert len(kept) < len(tensors)
        return kept

    return _tensors(of)


def _config(**values: Any) -> Damage:
    def do(directory: Path, _kind: str) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return do


def _file(name: str, content: str | bytes) -> Damage:
    def do(directory: Path, _kind: str) -> None:
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return do


def _index(shards: object) -> Damage:
    return _file("model.safetensors.index.json", json.dumps({"weight_map": shards}))


def _pickled(directory: Path, _kind: str) -> None:
    """Leaves a pickle alone that would write a file if it were read."""
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(_Evil(directory / "ran")))


class _Evil:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def _cut(directory: Path, _kind: str) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-40])


def _twice(directory: Path, kind: str) -> None:
    """Lets two shards have different tensors of one name, and leaves one of another name away."""
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(LAYERS[kind] + UP[kind])
    for number in (1, 2):
        save_file(tensors, directory / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})
    (directory / "model.safetensors").unlink()
    names = {name: f"model-0000{number % 2 + 1}-of-00002.safetensors" for number, name in enumerate(tensors)}
    index = {"metadata": {"total_size": 0}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


BROKEN: Final[dict[str, tuple[str, Damage]]] = {
    "a matrix is missing": ("no tensor", _without("layers.1.mlp.up_proj.weight")),
    "a layer is missing": ("no tensor", _without("layers.1.")),
    "the embedding is missing": ("no tensor", _without("embed_tokens")),
    "the last norm is missing": ("no tensor", _without("model.norm")),
    "a matrix is short": ("shape", _up(lambda t: t[:-1])),
    "a matrix is transposed": ("shape", _up(lambda t: t.t())),
    "a matrix is flat": ("shape", _up(torch.flatten)),
    "a matrix is empty": ("shape", _up(lambda t: t[:0])),
    "integers": ("has type", _up(lambda t: t.to(torch.int32))),
    "bytes": ("has type", _up(lambda t: t.to(torch.uint8))),
    "small floats without scales": ("has type", _up(lambda t: t.to(torch.float8_e4m3fn))),
    "truth values": ("has type", _up(lambda t: t > 0)),
    "a shard lacks a tensor": ("no tensor", _twice),
    "cut off": ("not fully covered", _cut),
    "no weights at all": ("cannot be read", _file("model.safetensors", b"")),
    "a pickle in the place of weights": ("no *.safetensors or *.gguf weights", _pickled),
    "a pickle that is called safetensors": ("cannot be read", _file("model.safetensors", pickle.dumps([1]))),
    "a zip that is called safetensors": ("cannot be read", _file("model.safetensors", b"PK\x03\x04" + bytes(64))),
    "an index that names no file": ("has no gone.safetensors", _index({"a": "gone.safetensors"})),
    "an index that names a pickle": ("not a weight file beside it", _index({"a": "pytorch_model.bin"})),
    "an index that leads out": ("not a weight file beside it", _index({"a": "../model.safetensors"})),
    "an index that names itself": ("not a weight file beside it", _index({"a": "model.safetensors.index.json"})),
    "an index without a map": ("not an index", _file("model.safetensors.index.json", "{}")),
    "a config that is no JSON": ("config.json cannot be read", _file("config.json", "{")),
    "a config that is a list": ("config.json cannot be read", _file("config.json", "[1]")),
    "a config that is binary": ("config.json cannot be read", _file("config.json", b"\xff\xfe\x00")),
    "a config of no known model": ("never-heard-of", _config(model_type="never-heard-of")),
    "code that comes with the model": ("auto_map", _config(model_type="x", auto_map={"AutoConfig": "x.X"})),
    "more layers than weights": ("no tensor", _config(num_hidden_layers=3)),
    "no layers": ("num_hidden_layers must be", _config(num_hidden_layers=0)),
    "negative layers": ("num_hidden_layers must be", _config(num_hidden_layers=-1)),
    "more layers than memory": ("num_hidden_layers must be", _config(num_hidden_layers=1 << 40)),
    "no heads": ("config.json", _config(num_attention_heads=0)),
    "a size that is text": ("config.json", _config(hidden_size="wide")),
    "a size that is null": ("config.json", _config(hidden_size=None)),
    "a size that overflows": ("hidden_size must be", _config(hidden_size=1 << 62)),
    "another vocabulary": ("shape", _config(vocab_size=130)),
    "another width": ("tensor", _config(hidden_size=32)),
    "a wrong end of sequence": ("config.json", _file("generation_config.json", '{"eos_token_id": {"a": 1}}')),
    "quantised by nobody knows what": ("quant", _config(quantization_config={"quant_method": "magic"})),
    "quantised by no object": ("quantization_config", _config(quantization_config=[1])),
}
FAMILIES_ONLY: Final = ("a matrix is missing", "the last norm is missing")
"""Damages whose names of tensors are Llama's."""
CASES: Final = [(kind, name) for kind in KINDS for name in BROKEN if kind == "llama" or name not in FAMILIES_ONLY]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    for kind, config in KINDS.items():
        saved(config, folders[kind])
        (folders[kind] / "tokenizer.json").write_text("{}")
    return folders


def copied(whole: Path, directory: Path) -> Path:
    for file in whole.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_broken_checkpoint_is_refused_in_one_line(
    kind: str, name: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    said, damage = BROKEN[name]
    damage(copied(whole[kind], tmp_path), kind)
    with pytest.raises(ConfigError) as refusal:
        _check_here(tmp_path)
    assert said in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "ran").exists()


def _check_here(directory: Path) -> None:
    """What a launcher asks, in this process."""
    model = ModelConfig(model=str(directory))
    found = locate(model.model, model.dtype)
    assert found is not None
    check_weights(found)
    check_tensors(found, model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_checkpoint_passes(kind: str, whole: dict[str, Path]) -> None:
    _check_here(whole[kind])


def test_what_only_cpus_compute_is_refused_where_a_gpu_is_named(whole: dict[str, Path], tmp_path: Path) -> None:
    saved(CONFIGS["deepseek_v2"], tmp_path)
    for directory, what in ((tmp_path, "latents"), (whole["opt"], "generic")):
        with pytest.raises(ConfigError, match=rf"^--device cuda does not compute .* \({what}\); use --device cpu$"):
            check_tensors(directory, ModelConfig(model=str(directory), device="cuda:1"))


LAUNCHED: Final = """
import sys
from pathlib import Path
from twostroke.config import ModelConfig
from twostroke.base.errors import ConfigError
from twostroke.models.checks.preflight import check_model
try:
    check_model(Path(sys.argv[1]), ModelConfig(model=sys.argv[1]))
    print("passed", "torch" in sys.modules)
except ConfigError as error:
    print(error, "torch" in sys.modules)
"""


def test_a_launcher_asks_without_torch_and_asks_once(
    whole: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    model = copied(whole["llama"], tmp_path / "model")
    _tensors(lambda tensors, _kind: {**tensors, "value_head.weight": torch.ones(3)})(model, "llama")

    def launched() -> tuple[str, str]:
        command = [sys.executable, "-c", LAUNCHED, str(model)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip(), done.stderr

    said, warned = launched()
    assert said == "passed False"
    assert "nothing reads tensor value_head.weight" in warned
    monkeypatch.setattr(subprocess, "run", _no_process)
    check_model(model, ModelConfig(model=str(model)))
    monkeypatch.undo()
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    _up(lambda t: t[:-1])(model, "llama")
    said, _ = launched()
    assert "tensor model.layers.1.mlp.up_proj.weight has shape (79, 48), the config says (80, 48)" in said
    assert said.endswith(" False")


def _no_process(*_: object, **__: object) -> None:
    raise AssertionError("what passed is not asked again")
