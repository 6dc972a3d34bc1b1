"""Steps of the protocol at which a test harness may kill, freeze or cut off the process.

Nothing happens there by itself. The harness is `tests.trials.chaos.injection`: it changes `HOOK` when a process starts.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Point(enum.StrEnum):
    """A step of the protocol, just before what its name says has any effect outside of the process."""

    ROUTER_RECEIVED = "router.received"
    """The router has the whole request; no other process knows of it."""
    ROUTER_PLACED = "router.placed"
    """A decode worker and a page source are chosen; neither has been told."""
    ROUTER_OPENED = "router.opened"
    """The decode worker has accepted; nothing has arrived."""
    ROUTER_FIRST_TOKEN = "router.first_token"
    """A first token has arrived; the client has not been told."""
    ROUTER_TOKEN = "router.token"
    """A later token has arrived; the client has not been told."""
    ROUTER_FINISHED = "router.finished"
    """The last word has arrived; the client has not been told."""
    ROUTER_CLOSING = "router.closing"
    """An answer is no longer wanted; its worker has not been told."""
    ROUTER_ATTACHING = "router.attaching"
    """A token stream is there again; nothing has been asked for over it."""
    ROUTER_EVENTS = "router.events"
    """A batch of a worker's event log has arrived; the index does not know of it."""
    ROUTER_VIEW = "router.view"
    """The supervisor has told who is alive; it has not been taken in."""
    ROUTER_PINNING = "router.pinning"
    """A pin's prefix is made of tokens; the supervisor has not been asked."""

    DECODE_OPENING = "decode.opening"
    """Open has arrived; nothing has been done."""
    DECODE_QUEUED = "decode.queued"
    """The request is in the queue; its router has no answer yet."""
    DECODE_ADMITTED = "decode.admitted"
    """Pages for the prompt plus one are claimed; nothing has been pulled."""
    DECODE_SAMPLED = "decode.sampled"
    """Tokens of a step are known; none has been sent."""
    DECODE_SENDING = "decode.sending"
    """A message with tokens is about to go out."""
    DECODE_PREEMPTED = "decode.preempted"
    """A sequence has lost its pages; it does not wait again yet."""
    DECODE_CLOSING = "decode.closing"
    """Close has arrived; nothing has been freed."""
    DECODE_ATTACHING = "decode.attaching"
    """Attach has arrived; the answer is still parked."""

    PULL_ASKING = "pull.asking"
    """Pages have a writer; their source has not been asked."""
    PULL_ANNOUNCED = "pull.announced"
    """Pages have been announced; none of these is copied."""
    PULL_COPIED = "pull.copied"
    """Announced pages are copied; none of these is verified."""
    PULL_COMMITTED = "pull.committed"
    """Pages are verified and readable; nothing has been computed from them."""
    PULL_ENDED = "pull.ended"
    """The pull has ended, however it did; pages that have not come still have their writer."""

    PAGES_ASKED = "pages.asked"
    """Pull has arrived; nothing has been done."""
    PAGES_ACCEPTED = "pages.accepted"
    """The blocks are queued for computing, or held; the puller has no answer yet."""
    PAGES_ANNOUNCING = "pages.announcing"
    """Digests are known; pages are about to be announced."""
    PAGES_RELEASING = "pages.releasing"
    """The puller's call has ended; the pages are still pinned."""

    PREFILL_ADMITTED = "prefill.admitted"
    """Pages for all missing blocks of a pull are claimed; none is computed."""

    WORKER_STEP = "worker.step"
    """A step is planned; it has not been run."""
    WORKER_COMPUTED = "worker.computed"
    """A step has been run; nothing of it is readable."""
    WORKER_EVENTS = "worker.events"
    """A batch of the event log is about to go out."""
    WORKER_DRAINING = "worker.draining"
    """Drain has arrived; nobody has been told."""

    TIER_WRITING = "tier.writing"
    """A page is copied for the disk; nothing of it is written."""
    TIER_WRITTEN = "tier.written"
    """A page is on disk; nobody can find it yet."""
    TIER_LOADING = "tier.loading"
    """Pages have a writer; nothing has been read from their tier."""
    TIER_LOADED = "tier.loaded"
    """Pages have been read and verified; none of these is readable."""

    PIN_PUTTING = "pin.putting"
    """A worker has been given a pin; nothing of it is kept."""
    PIN_BUILDING = "pin.building"
    """A pin lacks blocks; nothing has been queued for them."""
    PIN_BUILT = "pin.built"
    """All blocks of a pin are here; the sequence that brought them has not ended."""

    TRANSPORT_CONNECTING = "transport.connecting"
    """A reader is about to connect to a peer's pages."""
    TRANSPORT_GREETED = "transport.greeted"
    """An owner has checked a reader's hello; it has not answered."""
    TRANSPORT_ASKING = "transport.asking"
    """A reader is about to ask for pages (or to copy them, where it reads the owner's memory)."""
    TRANSPORT_SERVING = "transport.serving"
    """An owner has been asked for pages; it has sent nothing of them."""
    TRANSPORT_SENT = "transport.sent"
    """An owner has sent the bytes of pages; it has not said that they are still the same."""

    SUPERVISOR_CREATING = "supervisor.creating"
    """A worker's actor is about to be created or found."""
    SUPERVISOR_STARTING = "supervisor.starting"
    """A worker's epoch has its incarnation; it has not begun."""
    SUPERVISOR_ANNOUNCING = "supervisor.announcing"
    """A worker serves; nobody has been told."""
    SUPERVISOR_WATCHED = "supervisor.watched"
    """A router watches the fleet; it has not been told anything."""
    SUPERVISOR_WORKER_ENDED = "supervisor.worker_ended"
    """A worker's epoch has ended; nobody has been told."""
    SUPERVISOR_DRAINING = "supervisor.draining"
    """A drain has been asked for; the worker has not been told."""
    SUPERVISOR_PINNING = "supervisor.pinning"
    """Workers hold a new pin; it is not stored."""
    SUPERVISOR_PINNED = "supervisor.pinned"
    """A pin is held and stored; whoever asked for it has not been told."""
    SUPERVISOR_UNPINNING = "supervisor.unpinning"
    """A pin has gone from the store; no worker has been told."""
    SUPERVISOR_GIVING_PINS = "supervisor.giving_pins"
    """A worker serves; it has not been given its pins."""


@dataclass(slots=True)
class Hook:
    reached: Callable[[Point], bool] | None = None
    """None outside of the harness."""


HOOK = Hook()
"""One for the whole process, because the faults are faults of processes. The product never changes it."""


def reach(point: Point) -> bool:
    """Returns True where the caller is to drop the batch of events at hand; that is never so without a harness."""
    return HOOK.reached is not None and HOOK.reached(point)
