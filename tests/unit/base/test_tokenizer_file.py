"""Workers and routers of a fleet use the tokenizer that its fingerprint names, or say that it was replaced."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from router.metrics import RouterMetrics
from router.preparation.prepared_texts import PreparedTexts
from router.preparation.preparer import ProcessPreparer
from router.text import text_files
from router.text.text_files import TEXT_FILES, one_text, text_copy, text_digest
from router.text.tokenizer import ByteText
from twostroke.base.errors import ConfigError
from twostroke.base.tokenizer_file import is_of, read_tokenizer, tokenizer_field


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in TEXT_FILES:
        (tmp_path / name).write_text("old")
    return tmp_path


def test_a_tokenizer_that_was_replaced_after_the_model_was_loaded_is_refused(folder: Path) -> None:
    fingerprint = f"model=a;{tokenizer_field(folder)};block_size=16"
    assert read_tokenizer(folder, fingerprint) == "old"
    (folder / "tokenizer.json").write_text("new")
    assert read_tokenizer(folder) == "new"
    with pytest.raises(ConfigError, match="was replaced after this worker had loaded its model"):
        read_tokenizer(folder, fingerprint)


def test_a_fingerprint_that_says_nothing_of_a_file_fits_every_tokenizer(folder: Path) -> None:
    own = tokenizer_field(folder)
    assert is_of(own, f"model=a;{own}")
    assert is_of(own, "toy/1")
    assert is_of(own, "model=a;tokenizer=none")
    assert not is_of(own, "model=a;tokenizer=0123")


@pytest.mark.parametrize("name", TEXT_FILES)
def test_a_process_that_starts_later_finds_the_files_of_the_router_s_start_or_fails(folder: Path, name: str) -> None:
    digest = text_digest(str(folder))
    with one_text(str(folder), digest):
        pass
    (folder / name).write_text("new")
    with pytest.raises(ConfigError, match="was replaced after this router had started"), one_text(str(folder), digest):
        pytest.fail("it was entered")


@pytest.mark.parametrize("name", TEXT_FILES)
def test_files_that_change_while_a_router_reads_them_are_named(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} changed while it was read"), one_text(str(folder)):
        (folder / name).write_text("new")


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("caches")
    monkeypatch.setattr(text_files, "cache_dir", lambda: place)
    return place


@pytest.mark.usefixtures("caches")
def test_processes_that_prepare_requests_keep_their_text_when_the_models_folder_is_replaced(folder: Path) -> None:
    """They would fail when they start after that, and so would each request that needs one."""
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    preparers = [ProcessPreparer(ByteText(), str(folder), PreparedTexts(0, RouterMetrics())) for _ in range(2)]
    for name in (*TEXT_FILES, "additional_chat_templates/rag.jinja"):
        (folder / name).write_text("new")
    for preparer in preparers:
        for process in (preparer._small, preparer._large, preparer._grammars):
            with one_text(*process._files):
                assert (Path(process._files.model_dir) / "tokenizer.json").read_text() == "old"


def test_where_there_can_be_no_copy_the_models_folder_is_read(folder: Path, caches: Path) -> None:
    digest = text_digest(str(folder))
    copy = Path(text_copy(str(folder), digest))
    assert copy.is_relative_to(caches)
    assert len(list(copy.parent.iterdir())) == 1
    (copy / "tokenizer.json").write_text("somebody else's")
    assert text_copy(str(folder), digest) == str(folder)
    shutil.rmtree(caches)
    caches.write_text("no folder")
    assert text_copy(str(folder), digest) == str(folder)


def test_a_paced_model_has_no_files() -> None:
    assert text_copy("", text_digest("")) == ""
    with one_text("", text_digest("")):
        pass
