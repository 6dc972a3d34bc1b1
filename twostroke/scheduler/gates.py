"""What lets a waiting sequence begin, besides pages: copies of what it would evict, and its adapter."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import Protocol

from twostroke.ids import BlockHash, SessionId
from twostroke.request import AdapterRef
from twostroke.scheduler.sequence import Sequence


class ClaimGate(Protocol):
    """Decides when a waiting sequence may claim its pages."""

    def may_claim(self, session: SessionId, hashes: ListOf[BlockHash], private: int) -> bool:
        """Return False while blocks that the claim would evict are being saved; it is asked again after that."""

    def loaded_depth(self, hashes: ListOf[BlockHash]) -> int:
        """Return after how many of these blocks a sequence can go on once lower tiers have brought what they hold.

        It is 0 where they bring nothing.
        """


class OpenGate:
    """Lets every claim be made at once."""

    def may_claim(self, session: SessionId, hashes: ListOf[BlockHash], private: int) -> bool:
        return True

    def loaded_depth(self, hashes: ListOf[BlockHash]) -> int:
        return 0


class AdapterGate(Protocol):
    """Decides when a sequence with an adapter may begin, and learns who uses which."""

    def is_loaded(self, adapter: AdapterRef) -> bool:
        """Return whether a step can use it; if not, it is being loaded, and this is asked again after that."""

    def hold(self, sequence: Sequence) -> None:
        """Keep the adapter of a sequence that begins, until `release`."""

    def release(self, sequence: Sequence) -> None:
        """Let go of what a sequence holds; one that holds nothing is no error."""


class NoAdapters:
    """Serves the model alone."""

    def is_loaded(self, adapter: AdapterRef) -> bool:
        return False

    def hold(self, sequence: Sequence) -> None:
        """Nothing can be held."""

    def release(self, sequence: Sequence) -> None:
        """Nothing is held."""
