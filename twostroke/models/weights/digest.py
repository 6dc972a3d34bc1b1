"""The digest of a model's weights, over every byte of them and of their index of files. No torch here.

Reading gigabytes takes seconds, so the digest of each file is kept for as long as its path, device, inode, size and
both its times are the same. The time of its last write is not enough: archives and copies set it to an earlier one.
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
from dataclasses import asdict
from pathlib import Path
from typing import Final

from twostroke.base.cache_key import cache_key
from twostroke.models.catalog.places import cache_dir
from twostroke.models.file_versions import FileVersion, FileVersions, changed_while_read
from twostroke.models.weights.stored.tensor_header import SHARD_INDEX
from twostroke.security.trusted_paths import check_cache, make_folder

log = logging.getLogger(__name__)

DIGEST_BYTES: Final = 16
PIECE_BYTES: Final = 16 << 20
"""Bytes that one thread reads and digests at a time. The digest depends on this size."""
WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".gguf"})
THREADS: Final = 4
"""Threads that compute digests while the model is being loaded."""
SETTLED_S: Final = 2.0
"""Seconds since a file's last change after which its digest is kept. Before, it may change again without a new time of
change."""


def weights_digest(files: FileVersions) -> str:
    """Returns a digest of 128 bits over the names and all bytes of a model directory's weight files, as hexadecimal
    digits.

    The index of the files is one of them: if two files have a tensor of the same name, it determines which one is used.
    Raises ConfigError where a file is not the one in `files` any more, or is written to meanwhile.
    """
    started_s = time.monotonic()
    whole, read_bytes = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    with ThreadPoolExecutor(THREADS, thread_name_prefix="digest") as threads:
        for version in files.files:
            path = Path(version.path)
            if path.suffix not in WEIGHT_SUFFIXES and path.name != SHARD_INDEX:
                continue
            digest = _remembered(version)
            if digest is None:
                digest = _read(version, threads)
                read_bytes += version.size
                _remember(version, digest)
            whole.update(f"{path.name} {digest}\n".encode())
    log.info("weights digested read_bytes=%d seconds=%.3f", read_bytes, time.monotonic() - started_s)
    return whole.hexdigest()


def _read(version: FileVersion, threads: ThreadPoolExecutor) -> str:
    """Returns the digest of the file, read by its descriptor: its name may lead to another file by now. Raises
    ConfigError where it has changed."""
    try:
        opened = open(version.path, "rb")  # noqa: SIM115  # closed below
    except FileNotFoundError as error:
        raise changed_while_read([version.path]) from error
    with opened as file:

        def digest_at(start: int) -> bytes:
            piece = os.pread(file.fileno(), PIECE_BYTES, start)
            return hashlib.blake2b(piece, digest_size=DIGEST_BYTES).digest()

        pieces: Sequence[bytes] = list(threads.map(digest_at, range(0, version.size, PIECE_BYTES)))
        if FileVersion.from_status(version.path, os.fstat(file.fileno())) != version:
            raise changed_while_read([version.path])
    return hashlib.blake2b(b"".join(pieces), digest_size=DIGEST_BYTES).hexdigest()


def _remembered(version: FileVersion) -> str | None:
    memory = _memory_of(version)
    try:
        check_cache(memory)
        found = json.loads(memory.read_text(encoding="utf-8"))
        digest = str(found["digest"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return digest if found == {**asdict(version), "digest": digest} else None


def _remember(version: FileVersion, digest: str) -> None:
    """Writes a digest for later starts. If it cannot be written, the next start reads the file again."""
    is_settled = time.time_ns() - version.ctime_ns > SETTLED_S * 1e9
    memory = _memory_of(version)
    if not is_settled:
        return
    try:
        make_folder(memory.parent)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, prefix=".digest-", delete=False) as file:
            json.dump({**asdict(version), "digest": digest}, file)
        os.replace(file.name, memory)
    except OSError as error:
        log.warning("digest not remembered path=%s error=%s", memory, error)


def _memory_of(version: FileVersion) -> Path:
    key = cache_key("weights digest", path=version.path, piece_bytes=PIECE_BYTES)
    return cache_dir() / "models" / "digests" / f"{key}.json"
