"""Whether a model can be served at all: its config, its weight files, and that every tensor is there in its shape.

Launchers ask before they start a worker. What needs torch runs in a process of its own, once for the same files.

python -m twostroke.models.preflight DIRECTORY MODEL_CONFIG    prints the refusal; exit status 3 then
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import twostroke
from twostroke.config import ModelConfig
from twostroke.errors import ConfigError
from twostroke.kernels import layout
from twostroke.models import device_check
from twostroke.models import share as sharing
from twostroke.models.catalog.places import cache_dir
from twostroke.models.device_check import check_on_gpus
from twostroke.models.known_specs import known_spec, spec_key
from twostroke.models.weights.stored.check import check_weights
from twostroke.models.weights.stored.model_files import layouts_in

log = logging.getLogger(__name__)

REFUSED: Final = 3
"""The exit status of the process that refuses a model; others are crashes."""


def check_model(directory: Path, model: ModelConfig) -> None:
    """Raises ConfigError, one line, where the model cannot be served as `model` says."""
    check_weights(directory)
    passed = _memory_of(directory, model)
    if passed.exists():
        return
    _check_apart(directory, model)
    try:
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()
    except OSError as error:
        log.warning("checked model not remembered path=%s error=%s", passed, error)


def check_tensors(directory: Path, model: ModelConfig) -> None:
    """Raises what `check_model` raises, in this process, with torch. Reads headers, and no weights."""
    import torch

    from twostroke.models.families.table import named
    from twostroke.models.weights.stored.formats import open_weights
    from twostroke.models.weights.stored_shares import check_orders, shares_in
    from twostroke.models.weights.tensors import take_weights

    spec = known_spec(directory, model.max_model_len, model.model_impl)
    if model.names_gpu:
        check_on_gpus(spec, model, has_codes=layouts_in(directory) is not None)
    for flag, ranks in model.ranks_by_flag:
        check_orders(directory, shares_in(directory, spec, ranks, is_int8=model.weights == "int8", flag=flag)[0])
    if spec.generic is not None:
        from twostroke.models.generic.checkpoint import load_checkpoint  # loads transformers

        load_checkpoint(directory, torch.float32, with_head=True, device="meta")
    elif layouts_in(directory) is None:
        with open_weights(directory, torch.float32, torch.device("meta")) as files:
            take_weights(named(files, spec), spec, with_head=True)


def _check_apart(directory: Path, model: ModelConfig) -> None:
    paths = [str(Path(twostroke.__path__[0]).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "twostroke.models.preflight", str(directory), model.to_json()]
    child = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if child.returncode == REFUSED:
        refusal = child.stdout.strip()
        first = refusal.partition(" ")[0]
        raise ConfigError(refusal, field=first if first.startswith("--") else "model")
    if child.returncode:
        last = child.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"{directory} cannot be checked: {last}", field="model")


def _memory_of(directory: Path, model: ModelConfig) -> Path:
    """Return the place that says that the same files, read by the same code, passed."""
    key = hashlib.blake2b(spec_key(directory, model.max_model_len, model.model_impl).encode(), digest_size=16)
    key.update(f" {model.ranks_by_flag} {model.weights} {model.names_gpu} ".encode())
    for code in (__file__, sharing.__file__, layout.__file__, device_check.__file__):
        key.update(Path(code).read_bytes())
    for path in sorted([*directory.glob("*.safetensors*"), *directory.glob("*.gguf")]):
        status = path.stat()
        key.update(f" {path} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}".encode())
    return cache_dir() / "models" / "checked" / key.hexdigest()


def main(directory: str, config: str) -> int:
    try:
        check_tensors(Path(directory), ModelConfig.from_json(config))
    except ConfigError as error:
        print(error)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
