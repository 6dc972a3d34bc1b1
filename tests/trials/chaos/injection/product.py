"""How the injector takes hold of the product.

The product has one hook, `twostroke.base.fault_points.HOOK`. All else is wrapped from here, in this process only: each
entry of `PARTS` names a module and the function that wraps its classes, at once or as soon as the module is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote

from tests.sure_drafts import SureSpeculation, always
from tests.trials.chaos.injection.disk_notes import ENVIRONMENT as DISK_FAULTS
from tests.trials.chaos.injection.disk_notes import NotedFiles
from tests.trials.chaos.injection.event_faults import ENVIRONMENT as EVENT_FAULTS
from tests.trials.chaos.injection.event_faults import EventFaults, FaultRates
from tests.trials.chaos.injection.injector import Injector
from tests.trials.chaos.injection.plan import SURE_DRAFTS, Guard
from twostroke.base import fault_points

Around = Callable[..., Any]
"""Takes the function that it stands around, then what that is called with."""


class Injection:
    """The faults of one process, in the product's classes."""

    def __init__(self, injector: Injector) -> None:
        self.injector = injector
        self._undo = contextlib.ExitStack()
        self._later = dict(PARTS)

    def begin(self) -> None:
        self._undo.enter_context(patch.object(fault_points.HOOK, "reached", self.injector.reach))
        for name in PARTS:
            if name in sys.modules:
                self._later.pop(name)(self, sys.modules[name])
        finder = _OnImport(self)
        sys.meta_path.insert(0, finder)
        self._undo.callback(sys.meta_path.remove, finder)

    def end(self) -> None:
        self._undo.close()

    def waits_for(self, name: str) -> bool:
        return name in self._later

    def imported(self, module: ModuleType) -> None:
        self._later.pop(module.__name__)(self, module)

    def wrap(self, owner: Any, name: str, around: Around) -> None:
        """`around` is called instead of the function `name` of a class or module."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*args: Any, **named: Any) -> Any:
            return around(inner, *args, **named)

        self._undo.enter_context(patch.object(owner, name, outer))

    def guard(self, owner: Any, name: str, guard: Guard, otherwise: Around) -> None:
        """While the guard is off, `otherwise` is called instead of the function `name`."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def outer(*args: Any, **named: Any) -> Any:
            return (otherwise if self.injector.is_off(guard) else inner)(*args, **named)

        self._undo.enter_context(patch.object(owner, name, outer))


def inject(injector: Injector) -> Injection:
    """Injects faults until the end of the process, or the injection's."""
    injection = Injection(injector)
    injection.begin()
    return injection


@contextlib.contextmanager
def injected(injector: Injector) -> Iterator[Injector]:
    injection = inject(injector)
    try:
        yield injector
    finally:
        injection.end()


class _OnImport(MetaPathFinder):
    """Tells the injection of modules that it waits for, when they have been imported."""

    def __init__(self, injection: Injection) -> None:
        self._injection = injection
        self._asked: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in self._asked or not self._injection.waits_for(fullname):
            return None
        self._asked.add(fullname)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def then_wrap(module: ModuleType) -> None:
            execute(module)
            self._injection.imported(module)

        setattr(spec.loader, "exec_module", then_wrap)  # noqa: B010  # a loader belongs to one module
        return spec


def _processes(injection: Injection, module: ModuleType) -> None:
    """Routers that a launcher starts can be broken, too."""
    python, *options, name = module.COMMAND
    command = (python, *options, "tests.trials.chaos.injection.process", name)
    injection._undo.enter_context(patch.object(module, "COMMAND", command))


def _worker(injection: Injection, module: ModuleType) -> None:
    def begin(inner: Around, host: Any, config: Any, *args: Any) -> None:
        injection.injector.begin(config.worker_id)
        inner(host, config, *args)
        host.address = injection.injector.links.announce(host.address)

    injection.wrap(module.WorkerHost, "__init__", begin)


def _feeds(injection: Injection, module: ModuleType) -> None:
    """Event batches come in with faults where the environment gives rates."""
    rates = FaultRates.parse(os.environ.get(EVENT_FAULTS, ""))
    if rates is None:
        return
    streams = weakref.WeakKeyDictionary[Any, EventFaults]()

    def take(inner: Around, feed: Any, message: Any) -> bool:
        if feed not in streams:
            streams[feed] = EventFaults(rates, f"{feed._worker.worker_id} {feed._worker.epoch.incarnation}")
        return all(inner(feed, delivered) for delivered in streams[feed].deliver(message))

    injection.wrap(module.Feed, "_take", take)


def _router(injection: Injection, module: ModuleType) -> None:
    def begin(inner: Around, server: Any, *args: Any, **named: Any) -> None:
        inner(server, *args, **named)
        # By a port of clients: that is the same in the router's next process.
        injection.injector.begin(f"router-{server.addresses.grpc.rpartition(':')[2]}")

    injection.wrap(module.RouterServer, "__init__", begin)


def _supervisor(injection: Injection, module: ModuleType) -> None:
    def begin(inner: Around, supervisor: Any, *args: Any, **named: Any) -> None:
        injection.injector.begin("supervisor")
        inner(supervisor, *args, **named)

    def behind_a_proxy(inner: Around, supervisor: Any) -> Any:
        """The proxy has the port that routers know."""
        spec = supervisor._spec
        supervisor._spec = dataclasses.replace(spec, port=0)
        server = inner(supervisor)
        supervisor._spec = spec
        supervisor._address = injection.injector.links.announce(server.address, port=spec.port)
        return server

    injection.wrap(module.Supervisor, "__init__", begin)
    injection.wrap(module.Supervisor, "_server", behind_a_proxy)


def _channels(injection: Injection, module: ModuleType) -> None:
    links = injection.injector.links

    def dial(inner: Around, channel: Any, address: str, *args: Any, **named: Any) -> None:
        channel.dialled = links.dial(address)
        inner(channel, channel.dialled, *args, **named)
        channel.address = address

    async def hang_up(inner: Around, channel: Any) -> None:
        await inner(channel)
        links.hang_up(channel.dialled)

    injection.wrap(module.PeerChannel, "__init__", dial)
    injection.wrap(module.PeerChannel, "close", hang_up)


def _proofs(injection: Injection, module: ModuleType) -> None:
    """Peers dial the ports of proxies."""
    injection.wrap(module, "check_dialled", lambda inner, address, ports: None)


def _page_ports(injection: Injection, module: ModuleType) -> None:
    async def announce(inner: Around, *args: Any) -> tuple[str, Any]:
        address, listener = await inner(*args)
        return injection.injector.links.announce(address, pages=True), listener

    injection.wrap(module.NetworkTransport, "listen", announce)


def _page_readers(injection: Injection, module: ModuleType) -> None:
    def carry(inner: Around, wrapper: Any, sock: Any) -> Any:
        return inner(wrapper, injection.injector.links.carry(sock))

    for wrapper in (module.PlainWrapper, module.TlsWrapper):
        injection.wrap(wrapper, "dialled", carry)


def _page_requests(injection: Injection, module: ModuleType) -> None:
    injection.guard(module.PageRequest, "changed", Guard.FENCING, lambda *_: "")


def _same_host(injection: Injection, module: ModuleType) -> None:
    injection.guard(module, "refuse_changed", Guard.FENCING, lambda *_, **__: None)


def _shared_memory(injection: Injection, module: ModuleType) -> None:
    """There is no wire: a bit of a page that has just been copied is flipped."""
    landing: dict[Any, Any] = {}

    def pull(inner: Around, transport: Any, peer: Any, copies: Any, deadline_s: float) -> Any:
        transfer = inner(transport, peer, copies, deadline_s)
        if copies:
            landing[transfer] = copies[len(copies) // 2].local
        return transfer

    async def wait(inner: Around, transport: Any, transfer: Any) -> Any:
        try:
            result = await inner(transport, transfer)
        finally:
            page = landing.pop(transfer, None)
        if page is not None and result.outcome.name == "DONE" and injection.injector.links.take_corruption():
            damaged = memories[transport].page(page)
            damaged[len(damaged) // 2] ^= 1
        return result

    memories: dict[Any, Any] = {}

    async def opened(inner: Around, transport: Any, memory: Any, identity: Any) -> Any:
        memories[transport] = memory
        return await inner(transport, memory, identity)

    injection.wrap(module.ShmTransport, "open", opened)
    injection.wrap(module.ShmTransport, "pull", pull)
    injection.wrap(module.ShmTransport, "wait", wait)
    _same_host(injection, module)


def _leases(injection: Injection, module: ModuleType) -> None:
    async def at_once(service: Any) -> None:
        del service

    injection.guard(module.PagesService, "_until_cancelled", Guard.FENCING, at_once)


def _digests(injection: Injection, module: ModuleType) -> None:
    injection.guard(module.PullClient, "_intact", Guard.DIGESTS, lambda *digests: len(digests[-1]))


def _attempts(injection: Injection, module: ModuleType) -> None:
    def is_late(inner: Around, *args: Any) -> bool:
        return bool(inner(*args)) and not injection.injector.is_off(Guard.ATTEMPTS)

    injection.wrap(module.RequestManager, "_is_late", is_late)


def _resume(injection: Injection, module: ModuleType) -> None:
    def from_the_start(token: str, choices: int, field: str, *mark: Any) -> Any:
        del field
        client = unquote(token.partition(":")[0]).rpartition("~")[0]
        return module.StreamPoint.begin(client, choices, *mark)

    injection.guard(module.StreamPoint, "after", Guard.RESUME, from_the_start)


def _ranks(injection: Injection, module: ModuleType) -> None:
    def start(inner: Around, *args: Any) -> Any:
        rank = inner(*args)
        injection.injector.ranks.append(rank)
        return rank

    injection.wrap(module, "_start", start)


def _drafts(injection: Injection, module: ModuleType) -> None:
    def ran(inner: Around, metrics: Any, drafter: str, outcome: Any) -> None:
        inner(metrics, drafter, outcome)
        if drafter == module.DRAFT_MODEL and outcome.run:
            injection.injector.last_draft_s = time.time()

    injection.wrap(module.SpeculationMetrics, "ran", ran)
    if os.environ.get(SURE_DRAFTS):
        injection.wrap(module, "Speculation", lambda _, *args: SureSpeculation(*args))


def _draft_lengths(injection: Injection, module: ModuleType) -> None:
    """Drafts of a draft model have a fixed length where the environment says so."""
    if os.environ.get(SURE_DRAFTS):
        injection.wrap(module, "model_lengths", lambda _, *args: always(*args))
        injection.wrap(module, "pays_catching_up", lambda *_: True)


def _disk(injection: Injection, module: ModuleType) -> None:
    """Disks are slow, full or broken where the environment names a note that says so."""
    note = os.environ.get(DISK_FAULTS)
    if note is not None:
        injection.wrap(module, "SegmentFiles", lambda inner: NotedFiles(Path(note)))


PARTS: dict[str, Callable[[Injection, ModuleType], None]] = {
    "cluster.routers.process": _processes,
    "cluster.supervisor.supervisor": _supervisor,
    "decode_worker.request_manager": _attempts,
    "decode_worker.speculations": _drafts,
    "router.fleet.feed": _feeds,
    "router.requests.resume": _resume,
    "router.server": _router,
    "twostroke.ranks.processes": _ranks,
    "twostroke.rpc.channel": _channels,
    "twostroke.rpc.proof": _proofs,
    "twostroke.transfer.same_host.cuda_ipc": _same_host,
    "twostroke.transfer.network.network_transport": _page_ports,
    "twostroke.transfer.network.requests": _page_requests,
    "twostroke.transfer.sockets.tls": _page_readers,
    "twostroke.transfer.same_host.shm": _shared_memory,
    "twostroke.worker.host": _worker,
    "twostroke.worker.drafts.model_drafts": _draft_lengths,
    "twostroke.worker.tiers.opening": _disk,
    "twostroke.worker.services.pages_service": _leases,
    "twostroke.worker.pulls.pull_client": _digests,
}
