"""A model's config is read by transformers once per machine; what is remembered holds for these bytes alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.unit.models.test_registry import SIZES
from twostroke.base.errors import UnsupportedModel
from twostroke.models.known_specs import known_spec
from twostroke.models.registry import read_spec

LOADS_TRANSFORMERS = """
import sys
from pathlib import Path
from twostroke.models.known_specs import known_spec
known_spec(Path(sys.argv[1]))
sys.exit("transformers" in sys.modules)
"""


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def specs(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "models" / "specs").iterdir())


def change(directory: Path, **values: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_spec_is_the_same_when_it_is_remembered_and_needs_no_transformers(directory: Path, tmp_path: Path) -> None:
    assert known_spec(directory) == known_spec(directory) == read_spec(directory)
    assert len(specs(tmp_path)) == 1
    subprocess.run([sys.executable, "-c", LOADS_TRANSFORMERS, str(directory)], check=True)


def test_another_config_or_served_length_is_read_again(directory: Path, tmp_path: Path) -> None:
    first = known_spec(directory)
    change(directory, rms_norm_eps=0.125)
    assert known_spec(directory).norm_epsilon == 0.125 != first.norm_epsilon
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert known_spec(directory).eos_token_ids == (3, 5, 2)
    known_spec(directory, max_model_len=64)
    assert len(specs(tmp_path)) == 4


def test_another_tokenizer_with_another_end_token_is_read_again(directory: Path) -> None:
    assert known_spec(directory).eos_token_ids == (2,)
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    for end in (7, 9):
        (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": "<end>", "id": end}]}))
        assert known_spec(directory).eos_token_ids == (2, end)
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "special_tokens_map.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert known_spec(directory).eos_token_ids == (2, 9)


def test_what_is_damaged_is_read_again_and_what_is_refused_is_not_remembered(directory: Path, tmp_path: Path) -> None:
    known_spec(directory)
    (memory,) = specs(tmp_path)
    memory.write_text(memory.read_text()[:-30])
    assert known_spec(directory) == read_spec(directory)
    change(directory, hidden_act="relu2")
    for _ in range(2):
        with pytest.raises(UnsupportedModel):
            known_spec(directory)
    assert len(specs(tmp_path)) == 1
