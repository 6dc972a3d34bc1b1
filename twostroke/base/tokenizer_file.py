"""Which tokenizer.json a fleet serves: its digest is a part of the fingerprint, and each reader of the file compares
it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from twostroke.base.errors import ConfigError

FILE: Final = "tokenizer.json"
FIELD: Final = "tokenizer="
"""What a fingerprint says before the digest."""
NO_FILE: Final = "none"
BYTES: Final = "bytes"
"""What a paced model's fingerprint says: it takes the tokens of any tokenizer."""
DIGEST_BYTES: Final = 16


def tokenizer_field(directory: Path) -> str:
    """Returns what a fingerprint says about the tokenizer in a model's directory."""
    path = directory / FILE
    return f"{FIELD}{_digest(path.read_bytes()) if path.exists() else NO_FILE}"


def is_of(field: str, fingerprint: str) -> bool:
    """Returns whether a fingerprint has this field, or says nothing of a file."""
    found = next((part for part in fingerprint.split(";") if part.startswith(FIELD)), field)
    return found in {field, f"{FIELD}{NO_FILE}", f"{FIELD}{BYTES}"}


def read_tokenizer(directory: Path, fingerprint: str = "") -> str:
    """Returns the content of a model's tokenizer.json. Raises ConfigError for one that is not a fingerprint's."""
    path = directory / FILE
    try:
        content = path.read_bytes()
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read for grammars: {error}", field="model_dir") from error
    if not is_of(f"{FIELD}{_digest(content)}", fingerprint):
        raise ConfigError(
            f"{path} was replaced after this worker had loaded its model: restart the workers with the new tokenizer",
            field="model_dir",
        )
    return text


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()
