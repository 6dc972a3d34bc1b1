"""Which models can propose tokens for another one: smaller ones with the same vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.engine.tiny import TINY, save_tiny
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.models.drafts.check import (
    DraftModelPlan,
    check_draft,
    check_draft_size,
    draft_dir,
    naming_draft,
    plan_draft,
)

WORDS = {"a": 0, "b": 1}


def saved(
    directory: Path,
    vocabulary: object = WORDS,
    added: tuple[tuple[str, int], ...] = (),
    **sizes: int,
) -> Path:
    config = TINY.from_dict(TINY.to_dict() | sizes)
    save_tiny(directory, config)
    told = [{"content": token, "id": number} for token, number in added]
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": told}))
    return directory


def test_a_model_with_the_same_vocabulary_may_draft_however_its_file_lists_it(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", WORDS, (("<end>", 2),))
    check_draft("draft", saved(tmp_path / "same", WORDS, (("<end>", 2),)), model)
    check_draft("draft", saved(tmp_path / "listed", [["a", -1.0], ["b", -2.0], ["<end>", 0.0]]), model)


def test_other_vocabularies_and_the_model_itself_are_refused_in_one_line(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    (tmp_path / "link").symlink_to(model)
    refused = {
        "the model itself": tmp_path / "link",
        "draws from 65 tokens and the model from 64": saved(tmp_path / "larger", vocab_size=65),
        "differ in token 1 ": saved(tmp_path / "other", {"a": 0, "c": 1}),
        "differ in token 2 ": saved(tmp_path / "more", WORDS, (("<end>", 2),)),
    }
    for why, draft in refused.items():
        with pytest.raises(ConfigError, match=why) as raised:
            check_draft("draft", draft, model)
        assert "\n" not in raised.value.message
        assert raised.value.field == "--draft-model"


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    model, draft = saved(tmp_path / "model"), saved(tmp_path / "draft")
    (draft / "tokenizer.json").write_text("no json")
    with pytest.raises(ConfigError, match=r"draft/tokenizer\.json is not a tokenizer"):
        check_draft("draft", draft, model)


def test_a_directory_that_is_not_there_is_refused_as_the_models_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--draft-model '\./nothing' is not a directory"):
        draft_dir("./nothing", "bfloat16")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--draft-model \S+/empty: .* no config\.json"):
        draft_dir(str(tmp_path / "empty"), "bfloat16")


def test_page_memory_without_room_for_pages_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    draft, model = saved(tmp_path / "draft"), ModelConfig(dtype="float32")

    def planned(cache_bytes: int) -> DraftModelPlan:
        schedule = ScheduleConfig(draft_model=str(draft), draft_cache_bytes=cache_bytes)
        return plan_draft(draft, model, CacheConfig(), schedule)

    plan = planned(1 << 20)
    assert plan.pages == (1 << 20) // plan.page_bytes
    for cache_bytes in (1, plan.page_bytes):
        with pytest.raises(ConfigError, match=r"--draft-cache-memory .* at least 2 are needed: give"):
            planned(cache_bytes)


def test_a_draft_model_reads_fewer_bytes_of_weights_in_a_step_than_the_model(tmp_path: Path) -> None:
    model, copy = (saved(tmp_path / name, hidden_size=64) for name in ("model", "copy"))
    smaller = saved(tmp_path / "smaller", hidden_size=64, num_hidden_layers=1)
    whole = ModelConfig(model=str(model), dtype="float32")
    check_draft_size("draft", smaller, model, whole)
    check_draft_size("draft", copy, model, whole.replace(dtype="bfloat16"))  # it is drafted in int8
    for draft, config in ((copy, whole), (copy, whole.replace(dtype="bfloat16", weights="int8"))):
        with pytest.raises(ConfigError, match=r"reads (\d+) bytes of weights in a step and the model \1: ") as raised:
            check_draft_size("draft", draft, model, config)
        assert raised.value.field == "--draft-model"
    with pytest.raises(ConfigError, match=r"draft reads \d+ bytes"):
        check_draft_size("draft", model, smaller, whole)


def test_what_goes_wrong_with_a_draft_model_is_said_of_its_own_flag() -> None:
    with (
        pytest.raises(ConfigError, match=r"^--draft-model nobody") as raised,
        naming_draft("nobody/none"),
    ):
        raise ConfigError("--model nobody/none: the download from the hub failed", field="model")
    assert raised.value.field == "--draft-model"
