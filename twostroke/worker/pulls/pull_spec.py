"""What is to be pulled, what of it others see while it is under way, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

from twostroke.errors import ServeError
from twostroke.ids import BlockHash, PageId, RequestId, SessionId
from twostroke.kv_cache.parts import Part, parts_of
from twostroke.kv_cache.pool import BlockPool
from twostroke.kv_cache.tier import Group
from twostroke.request import AdapterRef
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.sequence import Sequence
from twostroke.tracing.span import OpenSpan


@dataclass(frozen=True, slots=True)
class PullSpec:
    """Blocks to pull for one request: `pages[block]` and `windows[block]` are claimed, arriving, nobody's to write."""

    request_id: RequestId
    session: SessionId
    source: worker_pb2.PageSource
    tokens: ListOf[int]
    block_hashes: ListOf[BlockHash]
    pages: dict[int, PageId]
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
    adapter: AdapterRef | None = None
    """The source computes the blocks with it."""
    windows: dict[int, PageId] = field(default_factory=dict)
    """Window parts to pull, by their blocks."""

    @property
    def parts(self) -> dict[Part, PageId]:
        """All that is to be pulled, in order."""
        return {
            part: (self.pages if part.group is Group.FULL else self.windows)[part.block]
            for part in parts_of(self.pages, self.windows)
        }

    @property
    def blocks(self) -> int:
        """Blocks of which anything is to be pulled."""
        return len(self.pages.keys() | self.windows.keys())

    @property
    def is_from_peer(self) -> bool:
        return self.cached_within_s is not None


@dataclass(slots=True)
class PullReport:
    """The result of a pull. Wanted blocks that were not pulled are left to local computation."""

    pulled: int = 0
    """Pulled blocks; one counts whose window part alone was wanted."""
    computed: int = 0
    """Pulled blocks that the source computed for this pull."""
    also_computed: int = 0
    """Other blocks that it computed, to come to those that were wanted."""
    transport: str = ""
    copied_bytes: int = 0
    wire_s: float = 0.0
    """Time of all copies."""
    converted: int = 0
    """Pages that were converted here."""
    first_page_s: float | None = None
    last_page_s: float | None = None
    failure: ServeError | None = None


@dataclass(frozen=True, slots=True)
class OpenPull:
    """A pull that has not ended."""

    spec: PullSpec
    started_s: float
    """Start, on the event loop's clock."""
    missing_blocks: int
    has_begun: bool
    """The source has announced pages."""
    is_computable: bool
    """All blocks before the first missing one are here, and no other sequence waits for the missing ones."""
    is_stopped: bool
    """The pull has been stopped and is about to end."""

    @property
    def source(self) -> str:
        return self.spec.source.worker_id


def open_pull(
    spec: PullSpec, pool: BlockPool, remaining: Iterable[int], *, started_s: float, has_begun: bool, is_left: bool
) -> OpenPull:
    """The pull as others see it; of the `remaining` blocks something has not come yet."""
    missing = sorted(set(remaining))
    is_reached = not missing[0] or pool.find(spec.block_hashes[missing[0] - 1]) is not None
    is_computable = is_reached and not any(
        pool.is_shared(spec.pages[block]) for block in missing if block in spec.pages
    )
    return OpenPull(spec, started_s, len(missing), has_begun, is_computable, is_left)


def windows_of(sequence: Sequence, blocks: Iterable[int]) -> dict[int, PageId]:
    """Return the slots in which a sequence waits for the window parts of these blocks."""
    return {} if sequence.windows is None else {block: sequence.windows.slots[block] for block in blocks}


def unwritten_windows(sequence: Sequence, pool: BlockPool, blocks: Iterable[int]) -> list[int]:
    """Return those of the blocks whose window parts a sequence waits for and nobody writes."""
    held, windows = sequence.windows, pool.windows
    if held is None or windows is None:
        return []
    slots = {block: held.slots[block] for block in blocks if block in held.slots}
    return [block for block, slot in slots.items() if windows.is_arriving(slot) and windows.writer(slot) is None]
