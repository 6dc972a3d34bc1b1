"""Every source of end tokens is asked, whatever the others say."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tests.unit.models.test_registry import SIZES
from twostroke.base.errors import ConfigError
from twostroke.models.known_specs import known_spec
from twostroke.models.registry import read_spec

VOCABULARY: Final = {"a": 0, "<config>": 3, "<turn>": 5, "<text>": 7, "<map>": 9, "<added>": 11}


def _config(directory: Path) -> None:
    change(directory / "config.json", eos_token_id=3)


def _generation(directory: Path) -> None:
    change(directory / "generation_config.json", eos_token_id=[5])


def _tokenizer(directory: Path) -> None:
    change(directory / "tokenizer_config.json", eos_token="<text>")


def _special_tokens(directory: Path) -> None:
    change(directory / "special_tokens_map.json", eos_token={"content": "<map>", "lstrip": False})


SOURCES: Final[Mapping[int, Callable[[Path], None]]] = {5: _generation, 3: _config, 9: _special_tokens, 7: _tokenizer}
"""What names each end token, in the order of the spec's."""


def change(file: Path, **values: Any) -> None:
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | values))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES, eos_token_id=None).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": VOCABULARY}}))
    return tmp_path


@pytest.mark.parametrize(
    "tokens", [some for count in range(5) for some in itertools.combinations(SOURCES, count)], ids=str
)
def test_sources_of_end_tokens_add_up(directory: Path, tokens: tuple[int, ...]) -> None:
    for token in tokens:
        SOURCES[token](directory)
    assert sorted(read_spec(directory).eos_token_ids) == sorted(tokens)


def test_a_tokenizer_as_transformers_saves_it_names_its_end_token(directory: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<turn>").save_pretrained(directory)
    _config(directory)
    assert read_spec(directory).eos_token_ids == (3, 5)


def test_texts_are_found_among_added_tokens_and_those_of_unigram_models(directory: Path) -> None:
    _tokenizer(directory)
    change(directory / "tokenizer.json", added_tokens=[{"content": "<text>", "id": 12}])
    assert read_spec(directory).eos_token_ids == (12,)
    change(directory / "tokenizer.json", added_tokens=[], model={"vocab": [["a", -1.0], ["<text>", -2.0]]})
    assert read_spec(directory).eos_token_ids == (1,)


def test_a_gguf_file_names_the_ends_of_texts_and_turns(directory: Path) -> None:
    _config(directory)
    assert known_spec(directory).eos_token_ids == (3,)
    writer = GGUFWriter(directory / "model.gguf", "llama")
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(7)
    writer.add_eom_token_id(9)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert known_spec(directory).eos_token_ids == read_spec(directory).eos_token_ids == (3, 5, 7, 9)


def test_a_gguf_file_that_names_no_token_is_refused_by_its_key(directory: Path) -> None:
    writer = GGUFWriter(directory / "model.gguf", "llama")
    writer.add_int32("tokenizer.ggml.eot_token_id", -1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.eot_token_id is -1"):
        known_spec(directory)


def test_what_transformers_takes_for_usual_ends_answers_only_where_nothing_names_a_token(directory: Path) -> None:
    """Llama's 2 is the sign # in Llama 3's vocabulary."""
    config = json.loads((directory / "config.json").read_text())
    del config["eos_token_id"]
    (directory / "config.json").write_text(json.dumps(config))
    assert read_spec(directory).eos_token_ids == (2,)
    _generation(directory)
    assert read_spec(directory).eos_token_ids == (5,)


def test_what_no_logit_stands_for_ends_nothing(directory: Path) -> None:
    change(directory / "config.json", eos_token_id=SIZES["vocab_size"])
    change(directory / "tokenizer_config.json", eos_token="<gone>")
    assert read_spec(directory).eos_token_ids == ()


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_damaged_file_is_refused_by_its_own_name(directory: Path, name: str) -> None:
    _tokenizer(directory)
    (directory / name).write_text("{")
    with pytest.raises(ConfigError, match=rf"{name} is no JSON"):
        read_spec(directory)


@pytest.mark.parametrize("ids", [-1, True, "2", [2, None], 2.0])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_token_is_refused_with_the_name_of_its_file(directory: Path, name: str, ids: object) -> None:
    change(directory / name, eos_token_id=ids)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        read_spec(directory)
