"""Checks that a model can be served at all: its config, its weight files, and the name and shape of every tensor.

Launchers call it before they start a worker. What needs torch runs in a separate process, and only once for the same
files. `python -m twostroke.models.checks.preflight DIRECTORY MODEL_CONFIG` prints which tensors nothing reads, or the
refusal with status 3.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import twostroke
from twostroke.base.cache_key import cache_key
from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig
from twostroke.models.catalog.places import cache_dir
from twostroke.models.checks.device_check import check_computed
from twostroke.models.file_versions import FileVersion
from twostroke.models.known_specs import known_spec, spec_key
from twostroke.models.weights.stored.check import check_weights
from twostroke.models.weights.stored.model_files import layouts_in
from twostroke.security.trusted_paths import check_cache, make_folder

log = logging.getLogger(__name__)

REFUSED: Final = 3
"""The exit status of a process that refuses a model. Other statuses above 0 are crashes."""


def check_model(directory: Path, model: ModelConfig) -> None:
    """Checks a model as a launcher needs it. Raises ConfigError, in one line, where it cannot be served with the config
    `model`."""
    check_weights(directory)
    passed = _memory_of(directory, model)
    try:
        check_cache(passed)
        note = passed.read_text(encoding="utf-8")
    except OSError:
        note = _check_apart(directory, model)
        _remember(passed, note)
    if note:
        log.warning("tensors unread note=%s", note)


def _remember(passed: Path, note: str) -> None:
    """Records that the files were checked. If the record cannot be written, the next start reads the files again."""
    try:
        make_folder(passed.parent)
        with tempfile.NamedTemporaryFile("w", dir=passed.parent, prefix=".checked-", delete=False) as file:
            file.write(note)
        os.replace(file.name, passed)
    except OSError as error:
        log.warning("checked model not remembered path=%s error=%s", passed, error)


def check_tensors(directory: Path, model: ModelConfig) -> str | None:
    """Checks a model in this process, with torch. Returns a sentence about tensors of its files that nothing reads, if
    any.

    Raises what `check_model` raises. It reads headers, and next to no weights.
    """
    import torch

    from twostroke.models.checks.unread_tensors import check_family_tensors
    from twostroke.models.families.table import named
    from twostroke.models.shares.share import check_shared_out
    from twostroke.models.shares.shared_out import check_orders, shares_in
    from twostroke.models.weights.stored.formats import open_weights
    from twostroke.models.weights.tensors import take_weights

    spec = known_spec(directory, model.max_model_len, model.model_impl)
    if model.names_gpu:
        check_computed(spec)
    for flag, ranks in model.ranks_by_flag:
        if model.names_gpu:
            check_shared_out(flag, ranks, has_codes=layouts_in(directory) is not None)
        check_orders(directory, shares_in(directory, spec, ranks, is_int8=model.weights == "int8", flag=flag)[0])
    if spec.generic is not None:
        from twostroke.models.generic.checkpoint import load_checkpoint  # loads transformers

        _, note = load_checkpoint(directory, torch.float32, with_head=True, device="meta")
        return note
    if layouts_in(directory) is None:
        with open_weights(directory, torch.float32, torch.device("meta")) as files:
            take_weights(named(files, spec), spec, with_head=True)
    return check_family_tensors(directory, spec)


def _check_apart(directory: Path, model: ModelConfig) -> str:
    """Runs `check_tensors` in another process. Returns its sentence, "" for None, and raises what it raises."""
    paths = [str(Path(twostroke.__path__[0]).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "twostroke.models.checks.preflight", str(directory), model.to_json()]
    child = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if child.returncode == REFUSED:
        refusal = child.stdout.strip()
        first = refusal.partition(" ")[0]
        raise ConfigError(refusal, field=first if first.startswith("--") else "model")
    if child.returncode:
        last = child.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"{directory} cannot be checked: {last}", field="model")
    return child.stdout.strip()


def _memory_of(directory: Path, model: ModelConfig) -> Path:
    """Returns the file that exists once the same files, read by the same code, have passed."""
    paths = sorted([*directory.glob("*.safetensors*"), *directory.glob("*.gguf")])
    weights = [FileVersion.of(path) for path in paths if path.exists()]  # a link may lead to a copy that was deleted
    key = cache_key(
        "checked model",
        spec=spec_key(directory, model.max_model_len, model.model_impl),
        ranks=model.ranks_by_flag,
        weights=model.weights,
        names_gpu=model.names_gpu,
        files=weights,
    )
    return cache_dir() / "models" / "checked" / key


def main(directory: str, config: str) -> int:
    try:
        note = check_tensors(Path(directory), ModelConfig.from_json(config))
    except ConfigError as error:
        print(error)
        return REFUSED
    print(note or "")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
