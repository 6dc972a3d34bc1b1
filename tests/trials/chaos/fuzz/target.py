"""One parser or port, as a fuzzer sees it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

Mutate = Callable[[bytes, random.Random], bytes]
Try = Callable[[bytes], None]
CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    seeds: Sequence[bytes]
    """Well-formed: what clients and peers send."""
    mutate: Mutate
    opened: Callable[[], AbstractContextManager[Try]]
    """Opens it. Each try raises only for what must never happen; so may the closing."""
    is_live: bool = False
    """Behind sockets and threads: coverage would say nothing."""

    @property
    def corpus(self) -> list[bytes]:
        """The seeds, and what has been interesting before."""
        return [*self.seeds, *(path.read_bytes() for path in sorted((CORPUS / self.name).glob("*")))]
