"""The keys of caches: digests of all that a cached content depends on, and of the code that makes it. No torch here.

A cache with a weaker key serves what an older version of the program made, or what was made of other files. So keys are
made only here. `CACHES` has a line for each cache: which code, and which libraries, make its content.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Final

PROGRAM: Final = Path(__file__).parent.parent
"""The folder of the program's own code."""
SOURCE_SUFFIXES: Final = frozenset({".py", ".cpp", ".h"})
KEY_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Maker:
    """The code that makes a content: of the same inputs, equal makers make the same."""

    code: tuple[str, ...]
    """Files of the program, and folders with all that is below them."""
    libraries: tuple[str, ...] = ()
    """Installed distributions."""

    def digest(self) -> bytes:
        """Returns a digest of the sources, and of the versions of the libraries."""
        facts = " ".join(f"{library}={_release(library)}" for library in self.libraries)
        return _digest((("libraries", facts), *((each, _source_digest(PROGRAM, each)) for each in self.code)))


CACHES: Final[Mapping[str, Maker]] = {
    "pages": Maker(
        (
            *("models", "kernels", "engine", "scheduler", "kv_cache", "page_forms", "ranks", "device"),
            # what copies and converts pages
            *("transfer", "worker/pull_ends.py", "worker/page_forms", "worker/pulls"),
            *("worker/services", "worker/tiers"),
        ),
        ("torch", "transformers", "numpy"),
    ),
    "packed weights": Maker(("models", "kernels", "kv_cache", "page_forms"), ("torch", "safetensors", "numpy")),
    "weights digest": Maker(("models/weights/digest.py", "models/file_versions.py")),
    "spec": Maker(
        ("models", "kernels", "kv_cache", "page_forms", "config", "base/json_values.py"), ("torch", "transformers")
    ),
    "checked model": Maker(
        ("models", "kernels", "kv_cache", "page_forms", "config"), ("torch", "transformers", "safetensors")
    ),
    "tokenizer twin": Maker(
        ("models/catalog/fetch.py",), ("transformers", "tokenizers", "sentencepiece", "tiktoken", "protobuf")
    ),
    "model of a GGUF file": Maker(
        ("models/catalog/fetch.py", "models/catalog/gguf.py"),
        ("transformers", "tokenizers", "torch", "gguf", "safetensors", "sentencepiece", "protobuf"),
    ),
    "native kernels": Maker(("kernels/cpu/native", "kernels/cpu/build.py", "kernels/cpu/variants.py")),
    "kernel choice": Maker(("kernels", "kv_cache", "page_forms"), ("torch",)),
    "machine limits": Maker(("kernels", "kv_cache", "page_forms", "worker/measured/machine_limits.py"), ("torch",)),
}
"""What makes the content of each cache. Pages are those of workers and of their tiers."""


def cache_key(cache: str, **inputs: object) -> str:
    """Returns the key of a content: 32 hexadecimal digits of the inputs and of the code that makes `cache`.

    `cache` is a key of `CACHES`. Inputs are bytes, or values with a repr that says all that they hold.
    """
    facts = (("cache", cache), ("maker", CACHES[cache].digest()), *sorted(inputs.items()))
    return _digest(facts).hex()


def content_digest(files: Iterable[tuple[str, Path]]) -> bytes:
    """Returns a digest of files' names, as they are given, and of all their bytes; a file that is not there is none."""
    return _digest((name, path.read_bytes() if path.is_file() else None) for name, path in files)


def _digest(facts: Iterable[tuple[str, object]]) -> bytes:
    """Returns the digest. Each name and value goes in after its length: none passes for a part of another one."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for name, value in facts:
        content = value if isinstance(value, bytes) else repr(value).encode()
        digest.update(f"{len(name)} {name} {type(value).__name__} {len(content)}\n".encode())
        digest.update(content)
    return digest.digest()


@functools.cache
def _source_digest(program: Path, code: str) -> bytes:
    """Returns the digest of some sources. Raises FileNotFoundError for missing code: then the table is wrong."""
    place = program / code
    found = place.rglob("*") if place.is_dir() else [place]
    sources = sorted(path for path in found if path.suffix in SOURCE_SUFFIXES)
    if not sources:
        raise FileNotFoundError(f"{place} has no sources")
    return content_digest([(str(path.relative_to(program)), _there(path)) for path in sources])


def _there(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    return path


@functools.cache
def version(library: str) -> str:
    """Returns the version of an installed distribution, whose metadata takes milliseconds to parse."""
    return metadata.version(library)


def _release(library: str) -> str:
    """Returns a library's version without its last part, which says for which devices it was built."""
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return "none"
