"""Decides whether a waiting sequence may claim its pages now, or waits until blocks that it would evict are copied."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import Protocol

from twostroke.base.ids import BlockHash, SessionId


class ClaimGate(Protocol):
    """Decides when a waiting sequence may claim its pages."""

    def may_claim(self, session: SessionId, hashes: ListOf[BlockHash], private: int) -> bool:
        """Returns False while blocks that the claim would evict are being saved; it is asked again after that."""

    def loaded_depth(self, hashes: ListOf[BlockHash]) -> int:
        """Returns after how many of these blocks a sequence can continue once suppliers here have brought theirs.

        It is 0 where they bring nothing.
        """


class OpenGate:
    """Lets every claim be made at once."""

    def may_claim(self, session: SessionId, hashes: ListOf[BlockHash], private: int) -> bool:
        return True

    def loaded_depth(self, hashes: ListOf[BlockHash]) -> int:
        return 0
