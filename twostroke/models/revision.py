"""What of a model besides its weights decides the bits of its pages, as text for fingerprints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

from twostroke.base.tokenizer_file import tokenizer_field
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.digest import DIGEST_BYTES

TRACES: Final = ("_name_or_path", "transformers_version")
"""Fields of a config.json that say which program saved it last."""


def revision_of(directory: Path, spec: ModelSpec) -> str:
    """Returns hashes of the config, of what it and the served length make of attention, and of the tokenizer."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for trace in TRACES:
        config.pop(trace, None)
    # longrope has two sets of numbers: which of them is used depends on the served length
    attention = repr((spec.architecture, spec.ropes, spec.rules))
    return (
        f"{_hash(json.dumps(config, sort_keys=True).encode())};attention={_hash(attention.encode())};"
        f"{tokenizer_field(directory)}"
    )


def _hash(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=DIGEST_BYTES).hexdigest()
