"""Copies of adapters on this machine, each in a folder named by its digest.

An adapter's own folder may be overwritten while requests still use what was in it. So a router that loads an adapter
keeps a copy, and workers read the copy. A worker on a machine without a copy reads the folder and checks the digest.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO, Final

from twostroke.base.errors import ConfigError
from twostroke.models.adapters.peft import CONFIG_FILE, MOST_LORA_RANK, WEIGHTS_FILE, Adapter, read_adapter
from twostroke.models.catalog.places import cache_dir
from twostroke.models.file_versions import unchanged
from twostroke.security.trusted_paths import OURS_TO_WRITE, UntrustedPath, check_cache, make_folder

log = logging.getLogger(__name__)

KEPT_S: Final = 6 * 3600.0
"""Seconds for which a copy is kept that no cluster has a name for: requests that began with it may still run."""


OWNERS: Final = ".owners"
"""Folder of the store. It has a file for each cluster that keeps copies."""
OWNER_SUFFIX: Final = ".owner"


def store_dir() -> Path:
    return cache_dir() / "adapters"


def take_in(folder: Path, *, most_lora_rank: int = MOST_LORA_RANK) -> Adapter:
    """Copies an adapter into the store, and returns it as it was read from the copy. Raises ConfigError.

    The copy is read, not the folder. So what was checked is what will be used, even if the folder changes meanwhile.
    """
    store = store_dir()
    make_folder(store)
    with tempfile.TemporaryDirectory(dir=store, prefix=".new-") as made:
        copy = Path(made) / "copy"
        copy.mkdir(mode=OURS_TO_WRITE)
        with unchanged(folder, (CONFIG_FILE, WEIGHTS_FILE), field="adapter"):  # both of one version
            _copy(folder, copy)
        adapter = read_adapter(copy, most_lora_rank=most_lora_rank)
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


def read_kept(digest: bytes, folder: Path, *, most_lora_rank: int = MOST_LORA_RANK) -> Adapter:
    """Returns the adapter of this digest: the copy, or what is in the folder now. Raises ConfigError where neither has
    it.

    A damaged copy counts as no copy.
    """
    place = store_dir() / digest.hex()
    for candidate in (place, folder):
        try:
            if candidate == place:
                _check_copy(place)
            adapter = read_adapter(candidate, most_lora_rank=most_lora_rank)
        except ConfigError:
            if candidate == folder:
                raise
            continue
        if adapter.digest == digest:
            return adapter
    raise ConfigError(f"{folder} holds another adapter by now, and this machine has no copy of the one that was loaded")


def _check_copy(place: Path) -> None:
    """Raises ConfigError where the copy is missing, or where other users may have written it."""
    try:
        check_cache(place)
    except UntrustedPath as error:
        log.warning("copy of an adapter is not trusted problem=%s", error.strerror)
        raise ConfigError(str(error.strerror)) from error
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error.strerror}") from error


class CopyOwner:
    """A cluster that keeps copies in the store. It lists the copies that this cluster has names for.

    The list is a file that it keeps locked. The kernel removes the lock when the process ends, for whatever reason.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._lock: int | None = None

    def keep(self, digests: Collection[bytes]) -> None:
        """Lists these copies as those that this cluster has names for. Raises OSError."""
        folder = store_dir() / OWNERS
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        made = folder / f".{secrets.token_hex(8)}"
        lock = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(lock, "\n".join(digest.hex() for digest in digests).encode())
            fcntl.flock(lock, fcntl.LOCK_EX)  # before others can see the file
            path = self._path or made.with_name(f"{made.name[1:]}{OWNER_SUFFIX}")
            made.rename(path)
        except BaseException:
            os.close(lock)
            made.unlink(missing_ok=True)
            raise
        before, self._path, self._lock = self._lock, path, lock
        if before is not None:
            os.close(before)

    def forget_others(self, kept: Collection[bytes], now_s: float | None = None) -> None:
        """Keeps these copies, and deletes those that no living owner has named for some hours. Raises OSError."""
        self.keep(kept)
        now_s = time.time() if now_s is None else now_s
        names = {digest.hex() for digest in kept} | self._names_of_others(now_s)
        for place in store_dir().glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another cluster has just deleted it
                if place.name in names:
                    os.utime(place, (now_s, now_s))
                elif place.name != OWNERS and now_s - place.stat().st_mtime > KEPT_S:
                    shutil.rmtree(place, ignore_errors=True)

    def _names_of_others(self, now_s: float) -> set[str]:
        """Returns the copies that other living owners list. Copies of an ended owner count as withdrawn now."""
        named = set[str]()
        for path in (store_dir() / OWNERS).glob(f"*{OWNER_SUFFIX}"):
            if path == self._path:
                continue
            with contextlib.suppress(FileNotFoundError), path.open() as file:
                names = file.read().split()
                if _is_owned(file, path):
                    named.update(names, path.read_text().split())
                    continue
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(store_dir() / Path(name).name, (now_s, now_s))
                path.unlink()
        return named

    def close(self) -> None:
        """Ends the list of this cluster."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def _is_owned(file: IO[str], path: Path) -> bool:
    """Returns whether the owner of the file at `path` lives. The owner may have replaced the file since `file` was
    opened.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return not os.path.samestat(os.fstat(file.fileno()), path.stat())


def _copy(folder: Path, to: Path) -> None:
    """Copies an adapter's folder. Raises ConfigError for one that lacks a file, or has weights that are never read."""
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
    """Returns the folder's real path. Raises ConfigError for one that is not below a folder of `allowed`.

    Links of the folder and of its files are followed first: what counts is where the bytes are, not how the path is
    written.
    """
    try:
        real, roots = folder.resolve(), [Path(root).resolve() for root in allowed]
        files = [real, *((real / name).resolve() for name in (CONFIG_FILE, WEIGHTS_FILE))]
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, NUL, half of a surrogate pair
        raise ConfigError(f"{str(folder)[:200]!r} is not a path: {error}", field="lora_path") from error
    if not all(any(file.is_relative_to(root) for root in roots) for file in files):
        raise ConfigError(
            f"{str(folder)[:200]!r} is not below a folder that adapters may come from (--lora-dirs)", field="lora_path"
        )
    return real
