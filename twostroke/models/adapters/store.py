"""Copies of adapters on this machine, each in a folder named by its digest.

An adapter's own folder may be overwritten while requests still use what was in it. Whoever loads an adapter keeps a
copy, and workers read the copy; a worker on a machine without one reads the folder itself and checks the digest.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from twostroke.errors import ConfigError
from twostroke.models.adapters.peft import CONFIG_FILE, MOST_RANK, WEIGHTS_FILE, Adapter, read_adapter
from twostroke.models.catalog.places import cache_dir

KEPT_S: Final = 6 * 3600.0
"""Seconds for which a copy is kept that no name leads to any more: requests that began with it may still run."""


def store_dir() -> Path:
    return cache_dir() / "adapters"


def take_in(folder: Path, *, most_rank: int = MOST_RANK) -> Adapter:
    """Copy an adapter into the store, and return it as it was read from the copy. Raises ConfigError.

    It is read after it was copied: what was checked is what will be used, whoever writes to the folder meanwhile.
    """
    store = store_dir()
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=store, prefix=".new-") as made:
        copy = Path(made) / "copy"
        copy.mkdir()
        _copy(folder, copy)
        adapter = read_adapter(copy, most_rank=most_rank)
        place = store / adapter.digest.hex()
        if place.is_dir():
            os.utime(place)
        else:
            try:
                copy.rename(place)
            except OSError:  # another process has put it there meanwhile
                if not place.is_dir():
                    raise
    return adapter


def read_kept(digest: bytes, folder: Path, *, most_rank: int = MOST_RANK) -> Adapter:
    """Return the adapter of this digest: the copy, or what is in the folder now. Raises ConfigError where neither is.

    A copy that is damaged counts for none.
    """
    place = store_dir() / digest.hex()
    for candidate in (place, folder):
        try:
            adapter = read_adapter(candidate, most_rank=most_rank)
        except ConfigError:
            if candidate == folder:
                raise
            continue
        if adapter.digest == digest:
            return adapter
    raise ConfigError(f"{folder} holds another adapter by now, and this machine has no copy of the one that was loaded")


def forget_others(kept: Collection[bytes], now_s: float | None = None) -> None:
    """Delete the copies that were not taken in, and not among the `kept` of a call, for some hours."""
    now_s = time.time() if now_s is None else now_s
    names = {digest.hex() for digest in kept}
    for place in store_dir().glob("*"):
        if place.name in names:
            os.utime(place, (now_s, now_s))
        elif now_s - place.stat().st_mtime > KEPT_S:
            shutil.rmtree(place, ignore_errors=True)


def _copy(folder: Path, to: Path) -> None:
    """Raises ConfigError for a folder that lacks a file, or has weights that are never read."""
    if not (folder / WEIGHTS_FILE).is_file():
        read_adapter(folder)  # says what is wrong
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        source = folder / name
        if source.is_file():
            try:
                shutil.copyfile(source, to / name)
            except OSError as error:
                raise ConfigError(f"{source} cannot be copied: {error.strerror}", field="adapter") from error


def check_place(folder: Path, allowed: Collection[str]) -> Path:
    """Return the folder as it really is. Raises ConfigError for one that is not below a folder of `allowed`.

    Links are followed first, those of its files too: a path says where bytes come from, and not how it is spelled.
    """
    try:
        real, roots = folder.resolve(), [Path(root).resolve() for root in allowed]
        files = [real, *((real / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE))]
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, NUL, half of a surrogate pair
        raise ConfigError(f"{str(folder)[:200]!r} is no path: {error}", field="lora_path") from error
    if not all(any(file.is_relative_to(root) for root in roots) for file in files):
        raise ConfigError(
            f"{str(folder)[:200]!r} is not below a folder that adapters may come from (--lora-dirs)", field="lora_path"
        )
    return real
