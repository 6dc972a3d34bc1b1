from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.lora import random_tensors, write_adapter
from twostroke.errors import ConfigError
from twostroke.models.adapters.peft import WEIGHTS_FILE, read_adapter
from twostroke.models.adapters.store import KEPT_S, check_place, forget_others, read_kept, store_dir, take_in


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))


def test_what_was_taken_in_can_be_read_after_its_folder_was_overwritten(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    first = take_in(folder)
    second = take_in(write_adapter(folder, random_tensors(seed=1)))
    assert read_kept(first.digest, folder).digest == first.digest
    assert read_kept(second.digest, folder).digest == second.digest != first.digest


def test_without_a_copy_the_folder_is_read_if_it_still_holds_the_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    digest = read_adapter(folder).digest
    assert read_kept(digest, folder).digest == digest
    write_adapter(folder, random_tensors(seed=1))
    with pytest.raises(ConfigError, match="another adapter by now"):
        read_kept(digest, folder)


def test_a_damaged_copy_counts_for_none(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    digest = take_in(folder).digest
    (store_dir() / digest.hex() / WEIGHTS_FILE).write_bytes(b"damage")
    assert read_kept(digest, folder).digest == digest


def test_copies_that_no_name_leads_to_are_deleted_after_some_hours(tmp_path: Path) -> None:
    kept, gone = (take_in(write_adapter(tmp_path / str(seed), random_tensors(seed=seed))).digest for seed in (0, 1))
    forget_others([kept])
    assert {place.name for place in store_dir().iterdir()} == {kept.hex(), gone.hex()}
    old = time.time() - KEPT_S - 1
    for place in store_dir().iterdir():
        os.utime(place, (old, old))
    forget_others([kept])
    assert [place.name for place in store_dir().iterdir()] == [kept.hex()]


def test_a_copy_that_had_a_name_until_now_is_kept_for_some_hours_from_now_on(tmp_path: Path) -> None:
    digest = take_in(write_adapter(tmp_path / "a")).digest
    place, old = store_dir() / digest.hex(), time.time() - KEPT_S - 1
    os.utime(place, (old, old))
    forget_others([digest])  # as its name is withdrawn
    forget_others([])
    assert place.is_dir()


@pytest.mark.parametrize("tricky", ["a\0b", "\ud800", "circle"])
def test_what_is_no_path_is_refused_in_one_line(tmp_path: Path, tricky: str) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ConfigError, match=r"is no path|lora-dirs") as refused:
        check_place(tmp_path / tricky, [str(tmp_path)])
    assert refused.value.message.isprintable()


def test_only_folders_below_those_that_are_allowed_are_taken(tmp_path: Path) -> None:
    allowed, outside = tmp_path / "allowed", write_adapter(tmp_path / "outside")
    folder = write_adapter(allowed / "a")
    assert check_place(folder, [str(allowed)]) == folder.resolve()
    (allowed / "link").symlink_to(outside)
    inner = write_adapter(allowed / "b")
    (inner / WEIGHTS_FILE).unlink()
    (inner / WEIGHTS_FILE).symlink_to(outside / WEIGHTS_FILE)
    for tricky in (outside, allowed / "link", allowed / ".." / "outside", inner, Path("/"), Path("allowed/a")):
        with pytest.raises(ConfigError, match="lora-dirs"):
            check_place(tricky, [str(allowed)])
    with pytest.raises(ConfigError, match="lora-dirs"):
        check_place(folder, [])
