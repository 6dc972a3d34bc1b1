"""The port of those who can write missing parts of a sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from twostroke.kv_cache.parts import Part
from twostroke.worker.supply.expected import ExpectedPages
from twostroke.worker.supply.pull_spec import PullReport


class Behind(Protocol):
    """The suppliers behind one, as that one sees them."""

    @property
    def is_expected(self) -> bool:
        """Whether the next one has said when it will bring its pages."""

    def arrival_s(self, blocks: Sequence[int]) -> float:
        """Returns in how many seconds the next one will have brought these blocks, in ascending order.

        Infinity where it does not bring them, or where that is not known.
        """

    def batches(self, blocks: Sequence[int]) -> list[list[int]]:
        """Divides blocks by how the next one has them: those that it holds, and those that it will compute."""

    def take_over(self, parts: Sequence[Part]) -> None:
        """Hands on parts that the supplier does not bring after all, as far as nobody else writes them by now."""

    def pulling(self, pull: asyncio.Future[PullReport]) -> None:
        """Notes that a pull has begun, which the sequence waits for."""


class Supplier(Protocol):
    """Whoever can write missing parts of one sequence."""

    @property
    def depth(self) -> int:
        """Leading blocks of the sequence of which it may bring parts."""

    @property
    def expected(self) -> ExpectedPages | None:
        """Returns what it is expected to send; None where that is not known."""

    def begin(self, parts: Sequence[Part], behind: Behind) -> list[Part]:
        """Begins to bring parts that have no writer, as far as it brings them sooner than those behind it.

        Returns the others. It is the writer of what it brings.
        """
