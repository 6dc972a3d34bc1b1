from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lora import random_tensors, write_adapter
from twostroke.base.errors import ConfigError
from twostroke.models.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from twostroke.models.adapters.store import KEPT_S, OWNERS, CopyOwner, check_place, read_kept, store_dir, take_in


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


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_an_adapter_that_is_replaced_while_it_is_copied_is_refused_and_nothing_of_it_is_kept(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config of one version beside weights of another would be an adapter that nobody made."""
    folder, copyfile = write_adapter(tmp_path / "a"), shutil.copyfile
    other = write_adapter(tmp_path / "b", random_tensors(seed=1))

    def replaced_first(source: Path, target: Path) -> None:
        copyfile(source, target)
        copyfile(other / name, folder / name)

    monkeypatch.setattr(shutil, "copyfile", replaced_first)
    with pytest.raises(ConfigError, match=rf"{name}.* changed while it was read") as refused:
        take_in(folder)
    assert refused.value.field == "adapter"
    assert not list(store_dir().iterdir())


def test_a_damaged_copy_counts_for_none(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a")
    digest = take_in(folder).digest
    (store_dir() / digest.hex() / WEIGHTS_FILE).write_bytes(b"damage")
    assert read_kept(digest, folder).digest == digest


def test_copies_that_no_name_leads_to_are_deleted_after_some_hours(tmp_path: Path) -> None:
    kept, gone = (take_in(write_adapter(tmp_path / str(seed), random_tensors(seed=seed))).digest for seed in (0, 1))
    owner = CopyOwner()
    owner.forget_others([kept])
    assert copies() == {kept.hex(), gone.hex()}
    old = time.time() - KEPT_S - 1
    for name in copies():
        os.utime(store_dir() / name, (old, old))
    owner.forget_others([kept])
    assert copies() == {kept.hex()}
    owner.close()


def copies() -> set[str]:
    return {place.name for place in store_dir().iterdir()} - {OWNERS}


def later() -> float:
    """Some hours from now."""
    return time.time() + KEPT_S + 1


def test_what_another_living_cluster_names_is_kept_however_old(tmp_path: Path) -> None:
    ours, theirs = (take_in(write_adapter(tmp_path / str(seed), random_tensors(seed=seed))).digest for seed in (0, 1))
    us, them = CopyOwner(), CopyOwner()
    them.keep([ours])
    them.keep([theirs])  # what it has named last counts
    us.forget_others([], now_s=later())
    assert copies() == {theirs.hex()}
    them.close()
    us.forget_others([], now_s=later())
    assert copies() == {theirs.hex()}, "it is as if withdrawn in this moment"
    us.forget_others([], now_s=later() + KEPT_S + 2)
    assert not copies()
    us.close()


def test_a_cluster_that_names_others_while_it_is_looked_at_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (take_in(write_adapter(tmp_path / str(seed), random_tensors(seed=seed))).digest for seed in (0, 1))
    us, them, flock = CopyOwner(), CopyOwner(), fcntl.flock
    them.keep([ours])

    def interleaved(file: Any, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        if how & fcntl.LOCK_SH:
            them.keep([theirs])
        else:
            monkeypatch.setattr(fcntl, "flock", interleaved)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", interleaved)
    us.forget_others([], now_s=later())
    assert theirs.hex() in copies()
    us.forget_others([], now_s=later() + KEPT_S + 2)
    assert copies() == {theirs.hex()}, "its file was taken for that of an ended one"
    them.close()
    us.close()


def test_a_copy_that_vanishes_does_not_end_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [take_in(write_adapter(tmp_path / str(seed), random_tensors(seed=seed))).digest for seed in (0, 1, 2)]
    utime, gone = os.utime, digests[0].hex()

    def vanishing(path: Path, times: tuple[float, float]) -> None:
        if Path(path).name == gone:
            raise FileNotFoundError(path)
        utime(path, times)

    monkeypatch.setattr(os, "utime", vanishing)
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda path, what: sorted(glob(path, what), key=lambda each: each.name != gone))
    (store_dir() / ("0" * 64)).symlink_to("nowhere")
    owner = CopyOwner()
    owner.forget_others(digests[:2], now_s=later())
    assert digests[1].hex() in copies()
    assert digests[2].hex() not in copies()
    owner.close()


def test_a_copy_that_had_a_name_until_now_is_kept_for_some_hours_from_now_on(tmp_path: Path) -> None:
    digest = take_in(write_adapter(tmp_path / "a")).digest
    place, old = store_dir() / digest.hex(), time.time() - KEPT_S - 1
    os.utime(place, (old, old))
    owner = CopyOwner()
    owner.forget_others([digest])  # as its name is withdrawn
    owner.forget_others([])
    owner.close()
    assert place.is_dir()


@pytest.mark.parametrize("tricky", ["a\0b", "\ud800", "circle"])
def test_what_is_no_path_is_refused_in_one_line(tmp_path: Path, tricky: str) -> None:
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(ConfigError, match=r"is not a path|lora-dirs") as refused:
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
