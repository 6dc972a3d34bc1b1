"""What to pull, and the report of a pull."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from twostroke.base.errors import ServeError
from twostroke.base.ids import BlockHash, PageId, RequestId, SessionId
from twostroke.kv_cache.parts import Part
from twostroke.request import WeightsRef
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.tracing.span import OpenSpan


@dataclass(frozen=True, slots=True)
class PullSpec:
    """Parts of blocks to pull for one request: their pages are claimed, arriving, and have no writer."""

    request_id: RequestId
    session: SessionId
    source: worker_pb2.PageSource
    tokens: ListOf[int]
    block_hashes: ListOf[BlockHash]
    parts: dict[Part, PageId]
    """Parts to pull, in order, and their claimed pages."""
    peer: PeerPrefix | None = None
    """A worker that holds a prefix, from which the source may fetch what it lacks."""
    cached_within_s: float | None = None
    """Time limit of a cached-only pull. None: the source computes what it lacks, as long as that takes."""
    deadline_s: float | None = None
    """Deadline of the request in Unix seconds. The source computes nothing for it afterwards, even if we died."""
    arrived: Callable[[int], None] | None = None
    """Called with each block as it becomes readable."""
    trace: OpenSpan | None = None
    """The parent span."""
    weights: WeightsRef | None = None
    """Weights besides the model's with which the source computes the blocks."""

    @property
    def blocks(self) -> int:
        """Blocks of which anything is to be pulled."""
        return len({part.block for part in self.parts})

    @property
    def is_from_peer(self) -> bool:
        return self.cached_within_s is not None


@dataclass(slots=True)
class PullReport:
    """The result of a pull. Wanted blocks that were not pulled are left to local computation."""

    pulled: int = 0
    """Pulled blocks, whichever of their pages were wanted."""
    computed: int = 0
    """Pulled blocks that the source computed for this pull."""
    also_computed: int = 0
    """Other blocks that the source computed because wanted ones follow them."""
    transport: str = ""
    copied_bytes: int = 0
    wire_s: float = 0.0
    """Time of all copies."""
    converted: int = 0
    """Pages that were converted here."""
    first_page_s: float | None = None
    last_page_s: float | None = None
    failure: ServeError | None = None
