"""The features that a scheduler is given. One table makes them where the worker is built."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Protocol

from twostroke.base.ids import BlockHash, SessionId
from twostroke.scheduler.batching import Chunk, Step
from twostroke.scheduler.cost import StepCost
from twostroke.scheduler.reading import InlineReadings, ReadingRunner
from twostroke.scheduler.sequence import Constraint, Sequence


class SharedConstraint(Constraint):
    """A constraint of every sequence of a worker, which also adds to each step."""

    def added_to(self, step: Step) -> Step:
        """Returns the step with what this feature adds to it."""
        return step

    def applied(self, step: Step) -> None:
        """Takes note that a step has succeeded. Its chunks are applied after this."""


class Extension(Protocol):
    """Lets proposed tokens run after the last known ones of streams."""

    def extended(
        self,
        chunks: list[Chunk],
        proposed: ListOf[int],
        cost: StepCost,
        most: int,
        grow: Callable[[Sequence], bool],
    ) -> list[Chunk]:
        """Returns the chunks of a step with up to `most` proposed tokens in all.

        `proposed` has the indices of the chunks whose sequences have a proposer. `grow` gives a sequence one more
        block, where there is room.
        """


class ClaimGate(Protocol):
    """Decides when a waiting sequence may claim its pages."""

    def may_claim(self, session: SessionId, hashes: ListOf[BlockHash], private: int) -> bool:
        """Returns False while blocks that the claim would evict are being saved; it is called again after that."""

    def loaded_depth(self, hashes: ListOf[BlockHash]) -> int:
        """Returns after how many blocks a sequence can continue once local suppliers have loaded theirs; 0 if none."""


class OpenGate:
    """Lets every claim be made at once."""

    def may_claim(self, session: SessionId, hashes: ListOf[BlockHash], private: int) -> bool:
        return True

    def loaded_depth(self, hashes: ListOf[BlockHash]) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class SchedulerBranches:
    shared: tuple[SharedConstraint, ...] = ()
    extension: Extension | None = None
    """Runs proposed tokens. None: no tokens are proposed here."""
    readings: ReadingRunner = field(default_factory=InlineReadings)
