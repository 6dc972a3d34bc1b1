"""The names under which adapters are served: the supervisor remembers them, and every fleet view has them.

They are stored in Ray, so that they outlive supervisor, routers and workers. A name that was removed stays stored
without an adapter. So a router that starts again with it on its command line does not bring it back. Where names become
too many, those that were removed first are forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc.aio

from cluster.supervisor.backend import MessageStore
from cluster.supervisor.fleet import SupervisedFleet
from cluster.supervisor.stored import DIGEST_BYTES, StoredMessages
from twostroke.base.errors import InvalidRequest, NotFound, Overloaded, ServeError
from twostroke.models.adapters.store import CopyOwner
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.membership import Membership
from twostroke.rpc.v1 import adapters_pb2, adapters_pb2_grpc, fleet_pb2

log = logging.getLogger(__name__)

MOST_ADAPTERS: Final = 4096
"""Names of one fleet, those that were removed included: some hundred bytes each in every view."""
CALL_S: Final = 3.0
Context = grpc.aio.ServicerContext[Any, Any]


class NamedAdapters(adapters_pb2_grpc.AdaptersServicer):
    """The names of the fleet's adapters, which the supervisor keeps as one of its branches."""

    service = "Adapters"

    def __init__(
        self,
        store: MessageStore,
        publish: Callable[[], int],
        workers: Callable[[], Sequence[str]],
        membership: Membership,
    ) -> None:
        """`publish` sends every watcher a new view and returns its version; `workers` returns their addresses."""
        self._stored: StoredMessages[adapters_pb2.NamedAdapter] = StoredMessages(
            store, "adapter", adapters_pb2.NamedAdapter, lambda each: _key(each.name), "load it again"
        )
        self._publish = publish
        self._workers = workers
        self._membership = membership
        self._known = {each.name: each for each in self._stored.kept().values()}
        """Names, the latest change last; one that was removed has no digest."""
        self._telling: asyncio.Task[None] | None = None
        self._is_untold = False
        """Whether workers have not been told of the last change yet."""
        self._copies = CopyOwner()
        """Says on this host which copies have names here, also to other clusters of this user."""
        self._kept = self._digests()
        """Adapters that had names when workers were last told: the copies of those withdrawn since are kept for now."""

        if self._kept:
            with contextlib.suppress(OSError):
                self._copies.keep(self._kept)

    @classmethod
    def of(cls, fleet: SupervisedFleet, store: MessageStore, membership: Membership) -> NamedAdapters:
        return cls(store, fleet.publish, fleet.addresses, membership)

    def add_to(self, server: grpc.aio.Server) -> None:
        adapters_pb2_grpc.add_AdaptersServicer_to_server(self, server)

    def add_to_view(self, view: fleet_pb2.FleetView) -> None:
        view.adapters.extend(each for each in self._known.values() if each.adapter.digest)

    async def begun(self, worker_id: str) -> None:
        """Brings nothing: a worker fetches an adapter with the first request for it."""

    async def Put(  # noqa: N802  # the name in the .proto
        self, request: adapters_pb2.PutAdapterRequest, context: Context
    ) -> adapters_pb2.PutAdapterResponse:
        """Raises InvalidRequest where the name has another adapter, or PeerLost where the store does not answer."""
        wanted = request.adapter
        known = self._known.get(wanted.name)
        if request.first and known is not None:
            return adapters_pb2.PutAdapterResponse()
        if len(wanted.adapter.digest) != DIGEST_BYTES or not wanted.name:
            raise InvalidRequest("an adapter needs a name and a digest", field="adapter")
        if known is not None and known.adapter.digest and not request.replace:
            raise InvalidRequest(f"The lora adapter {wanted.name!r} has already been loaded.", field="lora_name")
        if known is None and len(self._known) >= MOST_ADAPTERS:
            self._forget_removed()
        version = self._keep(wanted)
        log.info("adapter named name=%r adapter=%s", wanted.name, wanted.adapter.digest.hex())
        return adapters_pb2.PutAdapterResponse(version=version)

    async def Remove(  # noqa: N802
        self, request: adapters_pb2.RemoveAdapterRequest, context: Context
    ) -> adapters_pb2.RemoveAdapterResponse:
        """Raises NotFound, or PeerLost where the store does not answer."""
        known = self._known.get(request.name)
        if known is None or not known.adapter.digest:
            raise NotFound(f"The lora adapter {request.name!r} cannot be found.", field="lora_name")
        version = self._keep(adapters_pb2.NamedAdapter(name=request.name))
        log.info("adapter withdrawn name=%r adapter=%s", request.name, known.adapter.digest.hex())
        return adapters_pb2.RemoveAdapterResponse(version=version)

    async def stop(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)

    def _keep(self, adapter: adapters_pb2.NamedAdapter) -> int:
        self._stored.keep(adapter)
        self._known.pop(adapter.name, None)
        self._known[adapter.name] = adapter
        self._is_untold = True
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_workers())
        return self._publish()

    def _forget_removed(self) -> None:
        """Makes room for a name. Raises Overloaded where all names have adapters."""
        removed = next((name for name, each in self._known.items() if not each.adapter.digest), None)
        if removed is None:
            raise Overloaded(f"the fleet has {MOST_ADAPTERS} names of adapters, and takes no more; unload some")
        self._stored.forget(_key(removed))
        del self._known[removed]

    async def _tell_workers(self) -> None:
        """Says to all workers which adapters have names, one change after the other; some may be told as one.

        A worker that does not answer frees the others when it needs the room, or at the next change.
        """
        while self._is_untold:
            self._is_untold = False
            digests, before = self._digests(), self._kept
            self._kept = digests
            request = adapters_pb2.KeepAdaptersRequest(digests=sorted(digests))
            await asyncio.gather(*(self._tell(address, request) for address in self._workers()))
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._copies.forget_others, digests | before)

    def _digests(self) -> set[bytes]:
        return {each.adapter.digest for each in self._known.values() if each.adapter.digest}

    async def _tell(self, address: str, request: adapters_pb2.KeepAdaptersRequest) -> None:
        channel = PeerChannel(address, self._membership)
        try:
            stub = adapters_pb2_grpc.WorkerAdaptersStub(channel.channel)
            await channel.call(stub.Keep, request, CALL_S)
        except ServeError as error:
            log.info("adapters not told address=%s error=%s", address, error.message)
        finally:
            await channel.close()


def _key(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES).hexdigest()
