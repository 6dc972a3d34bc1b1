"""Placements of requests on workers, as long as the workers' own reports do not include them.

Without them, every request of a burst would go to the worker that was idle before it. Without those of other routers,
each router would send its own burst there. A reservation counts until a load report of the worker must include it, or
the request is over. Its blocks count until the first token, so that requests of a burst go where their common prefix is
being computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from twostroke.base.ids import BlockHash, RequestId, RouterId, WorkerId

REPORT_LAG_S = 0.05
"""Seconds from Open's response until the page source has the pull in its queue. Later reports include it."""
LOST_GRACE_S = 1.0
"""Seconds for which placements of a lost router count. Then it is back, or workers have reported what it had opened."""
FOREIGN_TTL_S = 600.0
"""Seconds after which a reservation of another router is dropped. No first token takes that long, so its end must have
been lost."""


@dataclass(frozen=True, slots=True)
class ReservedShare:
    """The load that one placed request adds to one worker."""

    tokens: int = 0
    """Tokens to compute there."""
    seconds: float = 0.0
    """Predicted seconds of computing them."""
    pages: int = 0
    """Pages to claim there."""
    streams: int = 0
    """Streams there: 1 on the decode worker, 0 on the page source."""


NOTHING = ReservedShare()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A reservation as routers exchange it: workers with a share will soon hold `block_hashes`."""

    request_id: RequestId
    shares: Mapping[WorkerId, ReservedShare]
    block_hashes: Sequence[BlockHash]
    is_opened: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationChanges:
    """Changes at one router; each request is in one of the three at most, so their order does not matter."""

    placed: tuple[Reservation, ...] = ()
    opened: tuple[RequestId, ...] = ()
    ended: tuple[RequestId, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.placed or self.opened or self.ended)


_Key = tuple[RouterId, RequestId]

OWN = RouterId("")
"""Stands for this router in keys. No router has this id."""


@dataclass(slots=True)
class _Placed:
    shares: Mapping[WorkerId, ReservedShare]
    block_hashes: Sequence[BlockHash]
    opened_at_s: float | None = None


@dataclass(slots=True)
class _Reserved:
    """The shares on one worker, and their sum, which every decision needs."""

    shares: dict[_Key, ReservedShare] = field(default_factory=dict)
    tokens: int = 0
    seconds: float = 0.0
    pages: int = 0
    streams: int = 0

    def add(self, share: ReservedShare, sign: int) -> None:
        self.tokens += sign * share.tokens
        self.seconds += sign * share.seconds
        self.pages += sign * share.pages
        self.streams += sign * share.streams


@dataclass(slots=True)
class _Foreign:
    """State of the reservations of one other router."""

    spoken_at_s: dict[RequestId, float] = field(default_factory=dict)
    """When its messages last named each request, in seconds, the oldest first."""
    lost_at_s: float | None = None


@dataclass(slots=True, eq=False)
class ReservationWatch:
    """Changes to be sent to one other router. Open requests bound them, however slowly that router reads."""

    on_change: Callable[[], None]
    changed: dict[RequestId, None] = field(default_factory=dict)
    sent: dict[RequestId, _Placed] = field(default_factory=dict)
    """Placements that were sent. A later one of the same request has to be sent again."""


class Reservations:
    """All reservations, of this router and of others. Time is passed in.

    Call `place`, `opened` and `end` for this router's requests, and `reported` for a worker's load report. Decisions
    read `on`, `requests_on` and `coming`.
    Each other router has a watch here. What `take(watch)` returns is sent to it: at first all that is open, then the
    changes. The receiver passes each batch to `apply`, with `whole` for the first one of a stream. When the stream
    ends, the receiver calls `lost` and the sender `unwatch`.
    """

    def __init__(self) -> None:
        self._placed: dict[_Key, _Placed] = {}
        self._reserved: dict[WorkerId, _Reserved] = {}
        self._coming: dict[BlockHash, tuple[WorkerId, ...] | dict[WorkerId, int]] = {}
        """Workers that will hold each block. Only if placements share a block, it has a dict that counts them: most
        blocks have one placement, and a queue of long prompts has millions of blocks."""
        self._foreign: dict[RouterId, _Foreign] = {}
        self._watches: list[ReservationWatch] = []

    def __len__(self) -> int:
        return len(self._placed)

    @property
    def foreign_count(self) -> int:
        return sum(len(foreign.spoken_at_s) for foreign in self._foreign.values())

    def place(self, request_id: RequestId, shares: dict[WorkerId, ReservedShare], hashes: Sequence[BlockHash]) -> None:
        """Reserves shares on workers, which will soon hold `hashes`. Replaces an earlier placement of the request."""
        self._drop((OWN, request_id))
        self._put((OWN, request_id), _Placed(shares, hashes))
        self._mark_changed(request_id)

    def opened(self, request_id: RequestId, now_s: float) -> None:
        """Notes that the decode worker has the request. From then on, `reported` may drop its shares."""
        placed = self._placed.get((OWN, request_id))
        if placed is not None:
            placed.opened_at_s = now_s
            self._mark_changed(request_id)

    def end(self, request_id: RequestId) -> None:
        """Ends a reservation: the first token has come, or the attempt is over."""
        if self._drop((OWN, request_id)):
            self._mark_changed(request_id)

    def reported(self, worker: WorkerId, now_s: float) -> None:
        """Drops the shares that a worker's load report includes: those that were opened long enough ago."""
        self._expire(now_s)
        reserved = self._reserved.get(worker)
        for key in list(reserved.shares) if reserved is not None else ():
            opened_at_s = self._placed[key].opened_at_s
            if opened_at_s is not None and opened_at_s + REPORT_LAG_S <= now_s:
                self._drop_share(worker, key)

    def watch(self, on_change: Callable[[], None]) -> ReservationWatch:
        """Begins to collect changes for another router. `on_change` is called when there is something to take."""
        watch = ReservationWatch(on_change)
        self._watches.append(watch)
        watch.changed.update((request_id, None) for router, request_id in self._placed if router == OWN)
        return watch

    def unwatch(self, watch: ReservationWatch) -> None:
        self._watches.remove(watch)

    def take(self, watch: ReservationWatch) -> ReservationChanges:
        """Returns the changes since the last call, each request in its present state."""
        changed, watch.changed = watch.changed, {}
        placed: list[Reservation] = []
        opened: list[RequestId] = []
        ended: list[RequestId] = []
        for request_id in changed:
            now = self._placed.get((OWN, request_id))
            if now is None:
                del watch.sent[request_id]
                ended.append(request_id)
            elif watch.sent.get(request_id) is now:
                opened.append(request_id)
            else:
                watch.sent[request_id] = now
                placed.append(self._own(request_id, now))
        return ReservationChanges(placed=tuple(placed), opened=tuple(opened), ended=tuple(ended))

    def apply(self, router: RouterId, batch: ReservationChanges, now_s: float, *, whole: bool = False) -> None:
        """Applies changes of another router's reservations. `whole`: the batch has all that are open there."""
        foreign = self._foreign.setdefault(router, _Foreign())
        foreign.lost_at_s = None
        if whole:
            for request_id in foreign.spoken_at_s.keys() - {told.request_id for told in batch.placed}:
                self._forget(router, request_id)
        for request_id in batch.ended:
            self._forget(router, request_id)
        for told in batch.placed:
            self._forget(router, told.request_id)
            opened_at_s = now_s if told.is_opened else None
            self._put((router, told.request_id), _Placed(told.shares, told.block_hashes, opened_at_s))
            foreign.spoken_at_s[told.request_id] = now_s
        for request_id in batch.opened:
            self._hear_opened(router, request_id, now_s)
        self._expire(now_s)

    def lost(self, router: RouterId, now_s: float) -> None:
        """Notes that another router's stream broke or did not begin. What it had placed counts for a moment longer."""
        foreign = self._foreign.get(router)
        if foreign is not None and foreign.lost_at_s is None:
            foreign.lost_at_s = now_s

    def on(self, worker: WorkerId) -> ReservedShare:
        """Returns the sum of everything reserved on one worker."""
        reserved = self._reserved.get(worker)
        if reserved is None:
            return NOTHING
        return ReservedShare(reserved.tokens, max(0.0, reserved.seconds), reserved.pages, reserved.streams)

    def seconds_on(self, worker: WorkerId) -> float:
        """Returns the predicted seconds of everything reserved on one worker."""
        reserved = self._reserved.get(worker)
        return 0.0 if reserved is None else max(0.0, reserved.seconds)

    def own_share(self, request_id: RequestId, worker: WorkerId) -> ReservedShare:
        """Returns the share of this router's request on the worker, if it still counts."""
        reserved = self._reserved.get(worker)
        return NOTHING if reserved is None else reserved.shares.get((OWN, request_id), NOTHING)

    def requests_on(self, worker: WorkerId) -> int:
        reserved = self._reserved.get(worker)
        return len(reserved.shares) if reserved is not None else 0

    def coming(self, block_hash: BlockHash) -> Iterable[WorkerId]:
        """Returns the workers that are about to hold the block."""
        return self._coming.get(block_hash, ())

    def _put(self, key: _Key, placed: _Placed) -> None:
        self._placed[key] = placed
        is_foreign = key[0] != OWN
        for worker, share in placed.shares.items():
            if is_foreign and share == NOTHING:
                continue  # its reports include it already
            reserved = self._reserved.setdefault(worker, _Reserved())
            reserved.shares[key] = share
            reserved.add(share, 1)
        holders = tuple(placed.shares)
        for block_hash in placed.block_hashes:
            coming = self._coming.get(block_hash)
            if coming is None:
                self._coming[block_hash] = holders
                continue
            if isinstance(coming, tuple):
                coming = self._coming[block_hash] = dict.fromkeys(coming, 1)
            for worker in holders:
                coming[worker] = coming.get(worker, 0) + 1

    def _drop(self, key: _Key) -> bool:
        """Drops a placement. Returns False if there is none."""
        placed = self._placed.pop(key, None)
        if placed is None:
            return False
        for worker in placed.shares:
            self._drop_share(worker, key)
        for block_hash in placed.block_hashes:
            coming = self._coming[block_hash]
            if isinstance(coming, tuple):
                del self._coming[block_hash]
                continue
            for worker in placed.shares:
                coming[worker] -= 1
                if not coming[worker]:
                    del coming[worker]
            if not coming:
                del self._coming[block_hash]
        return True

    def _drop_share(self, worker: WorkerId, key: _Key) -> None:
        reserved = self._reserved.get(worker)
        share = reserved.shares.pop(key, None) if reserved is not None else None
        if reserved is None or share is None:
            return
        reserved.add(share, -1)
        if not reserved.shares:
            del self._reserved[worker]  # with it, a rounding error in the sum of seconds is dropped

    def _own(self, request_id: RequestId, placed: _Placed) -> Reservation:
        """Returns the reservation as it is sent to other routers, with the shares that still count."""
        counted = {worker: self.own_share(request_id, worker) for worker in placed.shares}
        is_opened = placed.opened_at_s is not None
        return Reservation(request_id=request_id, shares=counted, block_hashes=placed.block_hashes, is_opened=is_opened)

    def _mark_changed(self, request_id: RequestId) -> None:
        is_over = (OWN, request_id) not in self._placed
        for watch in self._watches:
            if is_over and request_id not in watch.sent:
                watch.changed.pop(request_id, None)
                continue
            had_changes = bool(watch.changed)
            watch.changed[request_id] = None
            if not had_changes:
                watch.on_change()

    def _hear_opened(self, router: RouterId, request_id: RequestId, now_s: float) -> None:
        placed = self._placed.get((router, request_id))
        if placed is None:
            return
        if placed.opened_at_s is None:
            placed.opened_at_s = now_s
        spoken_at_s = self._foreign[router].spoken_at_s
        del spoken_at_s[request_id]
        spoken_at_s[request_id] = now_s

    def _forget(self, router: RouterId, request_id: RequestId) -> None:
        self._drop((router, request_id))
        self._foreign[router].spoken_at_s.pop(request_id, None)

    def _expire(self, now_s: float) -> None:
        for router, foreign in list(self._foreign.items()):
            is_lost = foreign.lost_at_s is not None and foreign.lost_at_s + LOST_GRACE_S <= now_s
            while foreign.spoken_at_s:
                request_id, spoken_at_s = next(iter(foreign.spoken_at_s.items()))
                if not is_lost and spoken_at_s + FOREIGN_TTL_S > now_s:
                    break
                self._forget(router, request_id)
            if is_lost:
                del self._foreign[router]
