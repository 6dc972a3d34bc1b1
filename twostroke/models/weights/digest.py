"""The digest of a model's weights, over every byte of them. No torch here.

Reading gigabytes takes seconds, so what was read is remembered: per file, for as long as its path, inode, size and both
its times are the same. The time of its last write alone would not do: archives and copies set it to an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from twostroke.models.catalog.places import cache_dir

log = logging.getLogger(__name__)

DIGEST_BYTES: Final = 16
PIECE_BYTES: Final = 16 << 20
"""What one thread reads and digests at a time; part of what the digest means."""
THREADS: Final = 4
"""They read beside whoever loads the model."""
SETTLED_S: Final = 2.0
"""A file that changed more recently may change again without a new time of change: its digest is not remembered."""


@dataclass(frozen=True, slots=True)
class _Version:
    """What must be the same for a remembered digest to hold."""

    path: str
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    """The system's own time of the last change: nobody can set it."""

    @classmethod
    def of(cls, path: Path) -> _Version:
        status = path.stat()
        return cls(str(path), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def weights_digest(directory: Path) -> str:
    """Return 128 bits of the names and all bytes of a model directory's weight files, as hexadecimal digits."""
    started_s = time.monotonic()
    whole, read_bytes = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    with ThreadPoolExecutor(THREADS, thread_name_prefix="digest") as threads:
        for path in sorted([*directory.glob("*.safetensors"), *directory.glob("*.gguf")]):
            version = _Version.of(path.resolve())
            digest = _remembered(version)
            if digest is None:
                digest = _read(version, threads)
                read_bytes += version.size
                _remember(version, digest)
            whole.update(f"{path.name} {digest}\n".encode())
    log.info("weights digested read_bytes=%d seconds=%.3f", read_bytes, time.monotonic() - started_s)
    return whole.hexdigest()


def _read(version: _Version, threads: ThreadPoolExecutor) -> str:
    with open(version.path, "rb") as file:

        def digest_at(start: int) -> bytes:
            piece = os.pread(file.fileno(), PIECE_BYTES, start)
            return hashlib.blake2b(piece, digest_size=DIGEST_BYTES).digest()

        pieces: Sequence[bytes] = list(threads.map(digest_at, range(0, version.size, PIECE_BYTES)))
    return hashlib.blake2b(b"".join(pieces), digest_size=DIGEST_BYTES).hexdigest()


def _remembered(version: _Version) -> str | None:
    try:
        found = json.loads(_memory_of(version).read_text(encoding="utf-8"))
        digest = str(found["digest"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return digest if found == {**asdict(version), "digest": digest} else None


def _remember(version: _Version, digest: str) -> None:
    """Nothing is lost where it cannot be written: the next start reads the file again."""
    is_settled = time.time_ns() - version.ctime_ns > SETTLED_S * 1e9
    memory = _memory_of(version)
    try:
        if not is_settled or _Version.of(Path(version.path)) != version:
            return
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, prefix=".digest-", delete=False) as file:
            json.dump({**asdict(version), "digest": digest}, file)
        os.replace(file.name, memory)
    except OSError as error:
        log.warning("digest not remembered path=%s error=%s", memory, error)


def _memory_of(version: _Version) -> Path:
    key = hashlib.blake2b(version.path.encode(), digest_size=DIGEST_BYTES).hexdigest()
    return cache_dir() / "models" / "digests" / f"{key}.json"
