"""A peer as requests and pulls name it: a worker that holds the first blocks of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.rpc.v1 import worker_pb2

ANSWER_S = 0.5
"""Within this time a live peer has answered and sent its pages, even when it is busy. Only where there are very many
pages does it take longer, and computing them would take longer still."""


@dataclass(frozen=True, slots=True)
class PeerPrefix:
    worker: worker_pb2.PageSource
    blocks: int
    """How many of the prompt's first blocks the peer is expected to hold."""
    load_s: float = 0.0
    """Predicted seconds in which it brings these into its pool."""

    @classmethod
    def of(cls, message: worker_pb2.OpenRequest | worker_pb2.PullRequest) -> PeerPrefix | None:
        """Returns the peer that a message names, if any."""
        if not message.HasField("peer") or not message.peer_blocks:
            return None
        return cls(message.peer, message.peer_blocks, message.peer_load_s)

    def put(self, message: worker_pb2.OpenRequest | worker_pb2.PullRequest) -> None:
        """Names the peer in a message."""
        message.peer.CopyFrom(self.worker)
        message.peer_blocks = self.blocks
        message.peer_load_s = self.load_s
