"""A draft is what a drafter proposes as the next tokens of one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Proposal(NamedTuple):
    """Tokens that may come next, and how sure their drafter is of them."""

    tokens: tuple[int, ...]
    kind: str
    """The drafter's name and, after a space, what the proposal is based on. Proposals of one kind are right about
    equally often."""
    is_certain: bool = False
    """Whether the sampler will draw each of them, because no other token may come."""


@dataclass(frozen=True, slots=True)
class Draft:
    tokens: tuple[int, ...]
    chances: tuple[float, ...]
    """Chance of each token that it and all tokens before it are right; never rises."""


NOTHING = Draft((), ())


class Drafter(Protocol):
    """Proposes tokens for one answer. It belongs to the worker's event loop: a proposal takes microseconds."""

    def propose(self, known: Sequence[int], most: int) -> Proposal | None:
        """Returns up to `most` tokens that may come after `known`, which only grows; None where it has no proposal."""
