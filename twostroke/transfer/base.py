"""Moving pages between workers: one small interface, several transports.

The reader pulls. `open` makes this worker's pages readable; `connect` reaches a peer's; `pull` starts copying remote
pages into local ones; `wait` returns how that ended. After anything but DONE the local pages may still be written to
until `fence` has returned: the caller keeps them quarantined until then. DONE says that bytes of the announced
generation arrived, not that they are right: the caller checks the digest on its own copy.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import functools
import os
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from twostroke.base.errors import InvalidRequest
from twostroke.base.ids import Epoch, PageId
from twostroke.kv_cache.layout import PageRegion, PoolLayout
from twostroke.kv_cache.memory import Pages
from twostroke.security.trusted_paths import private_folder

SOCKETS: Final = "pages"
"""Name of the user's private folder with the Unix sockets of page transports."""
MOST_REGIONS: Final = 16
"""Most page groups of a peer: far more than any model has."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker that offers or reads pages. `token` is the cluster's shared secret, never part of a PageEndpoint."""

    worker_id: str
    epoch: Epoch
    fingerprint: str
    token: str


@dataclass(frozen=True, slots=True)
class PageEndpoint:
    """How to reach one worker's pages over one transport; travels inside rpc messages as bytes."""

    transport: str
    """Name of the implementation: "shm", "tcp", ..."""
    address: str
    """Address for that implementation: host:port, the name of a Unix socket, ..."""
    host_id: str
    """What `host_id()` returns at the owner: same-host transports compare it."""
    epoch: Epoch
    fingerprint: str
    layout: PoolLayout

    def pack(self) -> bytes:
        texts = [self.transport, self.address, self.host_id, str(self.epoch), self.fingerprint]
        return bytes(msgpack.packb([*texts, *numbers_of(self.layout)]))

    @classmethod
    def unpack(cls, data: bytes) -> PageEndpoint:
        """Returns the endpoint of these bytes. Raises InvalidRequest."""
        try:
            fields = msgpack.unpackb(data)
            if not isinstance(fields, list) or [type(value) for value in fields[:5]] != [str] * 5:
                raise ValueError("it does not hold five texts and then numbers")
            transport, address, host_id, epoch, fingerprint, *numbers = fields
            return cls(transport, address, host_id, Epoch.parse(epoch), fingerprint, layout_of(numbers))
        except (ValueError, TypeError) as error:
            raise InvalidRequest(f"page endpoint cannot be read: {error}", field="endpoint") from error


def numbers_of(layout: PoolLayout) -> list[int]:
    """Returns a layout as messages carry it: for each region, its pages and the bytes of a page."""
    return [number for region in layout.regions for number in (region.pages, region.page_bytes)]


def layout_of(numbers: Sequence[Any]) -> PoolLayout:
    """Returns the layout of a message. Raises ValueError."""
    if not 0 < len(numbers) <= 2 * MOST_REGIONS or len(numbers) % 2 or {type(value) for value in numbers} != {int}:
        raise ValueError(f"it does not say pages and bytes of 1 to {MOST_REGIONS} regions")
    if min(numbers) < 0:
        raise ValueError(f"regions of {numbers} pages and bytes")
    return PoolLayout(tuple(map(PageRegion, numbers[::2], numbers[1::2])))


class PageCopy(NamedTuple):
    """Copy the peer's page `remote`, if it still has `generation`, into our page `local`."""

    remote: PageId
    local: PageId
    generation: int


def page_copies(remote: Sequence[int], local: Sequence[PageId], generations: Sequence[int]) -> list[PageCopy]:
    """Returns the copies of these columns, without Python code for each copy."""
    return list(map(functools.partial(tuple.__new__, PageCopy), zip(remote, local, generations, strict=True)))


class ReadOutcome(enum.Enum):
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class TransferResult:
    outcome: ReadOutcome
    copied_bytes: int
    seconds: float
    """Time from the first request to the last byte copied."""
    reason: str = ""
    """Reason why it was not DONE."""


class Peer:
    """A connection to one epoch of one worker's pages."""

    endpoint: PageEndpoint


class Transfer:
    """One pull in flight."""


class PageTransport(abc.ABC):
    """One per worker and kind. Called from one event loop; copies run on threads of the transport's own."""

    name: str

    @abc.abstractmethod
    async def open(self, memory: Pages, identity: Identity) -> PageEndpoint:
        """Makes `memory` readable by peers that show the token and name this epoch and fingerprint. Called once."""

    @abc.abstractmethod
    def read_into(self, memory: Pages, identity: Identity) -> None:
        """Lets pulls copy into `memory` without making it readable. Called once, and instead of `open`."""

    @abc.abstractmethod
    def reaches(self, endpoint: PageEndpoint) -> bool:
        """Returns whether a peer's endpoint of this kind can be connected to from here."""

    @abc.abstractmethod
    async def connect(self, endpoint: PageEndpoint, deadline_s: float) -> Peer:
        """Reaches a peer within `deadline_s` seconds; idempotent per (address, epoch), a new epoch replaces the old.

        Raises PeerLost (no answer), StaleEpoch (another epoch answers), FingerprintMismatch (both values in the
        message) or Unauthenticated.
        """

    @abc.abstractmethod
    def pull(self, peer: Peer, copies: Sequence[PageCopy], deadline_s: float) -> Transfer:
        """Starts copying; it expires `deadline_s` seconds from now. Raises InvalidRequest for pages out of bounds."""

    @abc.abstractmethod
    async def wait(self, transfer: Transfer) -> TransferResult:
        """Returns how the transfer ended, soon after the deadline at the latest. May be awaited once."""

    @abc.abstractmethod
    async def fence(self, transfer: Transfer) -> None:
        """Returns when no byte of the transfer's local pages can change any more."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Ends all connections and threads, ours and served ones."""

    @property
    def refused(self) -> Mapping[str, int]:
        """Connections to our pages that were refused, by reason."""
        return {}


DIGEST_BYTES: Final = 8
"""Length of a digest."""


def digest(page: npt.NDArray[np.uint8] | bytes | memoryview) -> bytes:
    """Returns the digest of one page's bytes (XXH3, 64 bits). It detects damage and stale pages, not attackers."""
    return xxhash.xxh3_64_digest(page.data if isinstance(page, np.ndarray) else page)


async def fence_for_good(transport: PageTransport, transfer: Transfer) -> None:
    """Waits for the fence even when cancelled, because the pages may be written to until it has returned."""
    await until_done(transport.fence(transfer))


async def until_done(end: Coroutine[Any, Any, object]) -> None:
    """Waits for `end` even when cancelled; then raises CancelledError afterwards."""
    ending = asyncio.ensure_future(end)
    was_cancelled = False
    while not ending.done():
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            was_cancelled = True
    ending.result()
    if was_cancelled:
        raise asyncio.CancelledError


@functools.cache
def host_id() -> str:
    """Returns the kernel's boot id, the network namespace, and the device and inode of this user's folder of sockets.

    They are equal exactly for processes that can reach each other's Unix sockets and loopback. The id of a
    process without such a folder equals no other.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as text:
        boot_id = text.read().strip()
    try:
        folder = private_folder(SOCKETS).stat()
        sockets = f"{folder.st_dev}-{folder.st_ino}"
    except OSError:  # a transport with Unix sockets reports it when it is opened
        sockets = f"none-{secrets.token_hex(8)}"
    return f"{boot_id}/{os.stat('/proc/self/ns/net').st_ino}/{sockets}"


def shares_loopback(other: str) -> bool:
    """Returns whether the process with that host id reaches our loopback, whatever folder its sockets lie in."""
    return other.rpartition("/")[0] == host_id().rpartition("/")[0]
