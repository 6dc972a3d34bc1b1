"""Files that are changed while they are read are noticed, however they are changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke.base.errors import ConfigError
from twostroke.models.file_versions import FileVersions, unchanged


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("model.safetensors", "config.json", "tokenizer.model", "chat_template.jinja", "merges.txt"):
        (tmp_path / name).write_bytes(b"old")
    (tmp_path / "blob").write_bytes(b"old")
    (tmp_path / "linked.gguf").symlink_to(tmp_path / "blob")
    return tmp_path


def in_place(path: Path) -> None:
    """Writes as a copy over a file does, and sets the old times."""
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"new")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def renamed_over(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(b"new")
    os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    new.rename(path)


def link_elsewhere(folder: Path) -> None:
    (folder / "linked.gguf").unlink()
    (folder / "linked.gguf").symlink_to(folder / "config.json")


def fail_after_change(folder: Path) -> None:
    in_place(folder / "config.json")
    raise ZeroDivisionError


CHANGES: dict[str, Callable[[Path], None]] = {"in place": in_place, "renamed over": renamed_over, "removed": os.unlink}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.model", "chat_template.jinja", "merges.txt", "linked.gguf"]
)
def test_a_changed_file_is_named(folder: Path, name: str, change: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){name}.* changed while it was read"), unchanged(folder):
        CHANGES[change](folder / name)


def test_a_new_file_and_another_target_of_a_link_are_changes(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config\.json"), unchanged(folder):
        (folder / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match=r"linked\.gguf"), unchanged(folder):
        link_elsewhere(folder)


def test_files_that_nothing_is_read_from_may_change(folder: Path) -> None:
    with unchanged(folder):
        for name in ("training.log", "log.txt", "trainer_state.json"):
            (folder / name).touch()
        (folder / "model.safetensors").read_bytes()


def test_an_error_within_is_not_replaced(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), unchanged(folder):
        fail_after_change(folder)


def test_a_change_right_after_the_files_were_written_is_seen(folder: Path) -> None:
    """Two changes within one tick of the clock of the files have the same time."""
    for _ in range(20):
        in_place(folder / "config.json")
        versions = FileVersions.now(folder)
        in_place(folder / "config.json")
        with pytest.raises(ConfigError, match=r"config\.json"):
            versions.check_unchanged()
