"""The live work loop, pull client and page service on virtual time: simulated are the device, the wires and the calls.

Messages, tasks and deadlines are the live ones, one step after the other. What a simulated worker runs instead
(`FastParts`) is held against this.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from tools.simulate.fleet.worker.host import SimulatedHost
from tools.simulate.fleet.worker.live_loop import LiveLoop
from tools.simulate.fleet.worker.pulls import COPY_PAGES, carry
from tools.simulate.fleet.worker.steps import SAMPLED
from twostroke.base.errors import TransferFailed
from twostroke.base.ids import PageId
from twostroke.kv_cache.layout import PoolLayout
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.batch import Batch, StepResult
from twostroke.scheduler.batching import BatchBuilder, StepBuilder
from twostroke.scheduler.cost import Budget, StepTerms
from twostroke.scheduler.step_target import StepTarget
from twostroke.transfer.base import DIGEST_BYTES, PageEndpoint, ReadOutcome, TransferResult
from twostroke.worker.condition import Condition
from twostroke.worker.measured.rates import Rates
from twostroke.worker.pull_ends import DirectLanding
from twostroke.worker.pulls.pull_client import PullClient, PullLimits
from twostroke.worker.request_validator import RequestValidator
from twostroke.worker.services.pages_service import PagesService
from twostroke.worker.steps.sharing import TimeSharing
from twostroke.worker.supply.pull_spec import PullReport, PullSpec

NEVER_S = 1e6


class LiveParts:
    lengths = None

    def step_builder(self, host: SimulatedHost) -> StepBuilder:
        return BatchBuilder(host.shape.block_size, host.facts.pages, ())

    def loop(self, host: SimulatedHost) -> LiveLoop:
        rates = KnownRates(host.budget)
        sharing = TimeSharing(host.scheduler, rates, StepTarget(host.shape.step_target_s), host.virtual_loop.time)
        return LiveLoop(host, Device(host), sharing, rates)

    def pulls(self, host: SimulatedHost) -> LivePulls:
        return LivePulls(host)


# The work loop


class Device:
    """An engine thread whose steps take what they cost."""

    def __init__(self, host: SimulatedHost) -> None:
        self._host = host

    def start(self, batch: Batch) -> asyncio.Future[StepResult]:
        loop, terms = self._host.virtual_loop, StepTerms.of(batch)
        seconds = self._host.shape.cost.of(terms)
        done = loop.create_future()
        loop.call_later(seconds, done.set_result, StepResult((SAMPLED,) * terms.streams, seconds))
        return done

    def stop(self) -> None: ...


class KnownRates(Rates):
    """The costs are known from the beginning, as the simulator knows them."""

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self._budget = budget
        self.cost = budget.cost

    def budget(self, target_s: float, waiting_s: float | None = None) -> Budget:
        return self._budget

    def observe(self, terms: StepTerms, seconds: float) -> None: ...


# The pull client and its calls


class Wiring:
    """A page transport over the simulated wires."""

    name = "wire"

    def __init__(self, host: SimulatedHost) -> None:
        self._host = host

    def pull(self, source: SimulatedHost, copies: Sequence[object], deadline_s: float) -> tuple[float, float, int]:
        host = self._host
        begun_s, size_bytes = host.queue.now_s, len(copies) * host.shape.page_bytes
        source.gave(len(copies))
        return begun_s, carry(source.wire, host.wire, size_bytes, begun_s), len(copies)

    async def wait(self, transfer: tuple[float, float, int]) -> TransferResult:
        begun_s, end_s, pages = transfer
        await asyncio.sleep(end_s - begun_s)
        self._host.pulled(pages)
        return TransferResult(ReadOutcome.DONE, pages * self._host.shape.page_bytes, end_s - begun_s)

    async def fence(self, transfer: object) -> None: ...


class Digests:
    async def of(self, pages: Sequence[PageId]) -> list[bytes]:
        return [bytes(DIGEST_BYTES)] * len(pages)


class LivePulls:
    def __init__(self, host: SimulatedHost) -> None:
        self._host = host
        self._progress = Condition()
        self._validator = RequestValidator(host.worker, host.epoch, "", host.metrics)
        unused: Any = None
        digests: Any = Digests()
        self._client = PullClient(
            self._validator,
            host.pool,
            DirectLanding(digests, [], host.pool.total),
            host.metrics,
            us=unused,
            limits=PullLimits(copy_s=NEVER_S, silence_s=NEVER_S),
            wake=lambda: host.loop.wake(),  # noqa: PLW0108  # there is no loop yet
        )
        client: Any = self._client
        client._channel, client._connect = self._channel, self._connect
        self.links = self._client.links
        self.prune = self._client.prune
        self.open_pulls = self._client.open_pulls
        self.stop_one = self._client.stop_one
        self._service: PagesService | None = None

    def start(self, spec: PullSpec, tasks: asyncio.TaskGroup) -> asyncio.Future[PullReport]:
        group: Any = SimpleNamespace(create_task=self._host.virtual_loop.create_task)
        return self._client.start(spec, group)

    def __len__(self) -> int:
        return len(self._client._sessions) + (self._service.open if self._service is not None else 0)

    def announce(self) -> None:
        self._progress.notify()

    def break_off(self) -> None: ...

    @property
    def service(self) -> PagesService:
        if self._service is None:
            host: Any = self._host
            endpoint = PageEndpoint("wire", host.worker, "", host.epoch, "", PoolLayout.of(0, 0))
            view: Any = SimpleNamespace(
                pool=host.pool, loop=host.loop, validator=self._validator, progress=self._progress,
                metrics=host.metrics,
                facts=host.facts, config=host.config,
                digests=Digests(), endpoints=[endpoint],
                memory=SimpleNamespace(page_bytes=host.shape.page_bytes, generations_of=lambda pages: [0] * len(pages)),
                branches=SimpleNamespace(below=host.loads and host.loads.for_others, served=None),
            )  # fmt: skip
            unused: Any = None
            self._service = PagesService(view, host.actions, unused)
        return self._service

    async def _channel(self, source: worker_pb2.PageSource) -> Any:
        def call(request: worker_pb2.PullRequest, **said: object) -> Call:
            return Call(self._host, self._host.party(source.worker_id), request)

        channel = SimpleNamespace(unary_stream=lambda *_, **__: call, unary_unary=lambda *_, **__: None)
        return SimpleNamespace(channel=channel, metadata=())

    async def _connect(self, endpoints: Sequence[PageEndpoint], _transports: object) -> tuple[Wiring, SimulatedHost]:
        return Wiring(self._host), self._host.party(endpoints[0].address)


class Call:
    """One Pull, each way in the time that a message takes."""

    def __init__(self, host: SimulatedHost, source: SimulatedHost, request: worker_pb2.PullRequest) -> None:
        self._loop = host.virtual_loop
        self._delay_s = host.shape.delays.pull_s
        self._said: asyncio.Queue[worker_pb2.PullResponse | TransferFailed] = asyncio.Queue()
        pulls: Any = source.pulls
        self._task = self._loop.create_task(self._serve(pulls.service.Pull(request, None)))

    async def read(self) -> worker_pb2.PullResponse:
        said = await self._said.get()
        if isinstance(said, TransferFailed):
            raise said
        return said

    def cancel(self) -> None:
        self._task.cancel()

    async def _serve(self, responses: AsyncIterator[worker_pb2.PullResponse]) -> None:
        await asyncio.sleep(self._delay_s)
        try:
            async for response in responses:
                for part in _parts(response):
                    self._loop.call_later(self._delay_s, self._said.put_nowait, part)
        except TransferFailed as error:
            self._loop.call_later(self._delay_s, self._said.put_nowait, error)
        finally:
            await responses.aclose()  # type: ignore[attr-defined]  # it is a generator


def _parts(response: worker_pb2.PullResponse) -> Iterator[worker_pb2.PullResponse]:
    """An announcement holds what one step of a page source computes, about."""
    whole = response.ready
    if len(whole.pages) <= COPY_PAGES:
        yield response
        return
    computed = whole.computed
    for at in range(0, len(whole.pages), COPY_PAGES):
        part = slice(at, at + COPY_PAGES)
        ready = worker_pb2.PagesReady(
            blocks=whole.blocks[part],
            pages=whole.pages[part],
            generations=whole.generations[part],
            digests=whole.digests[at * DIGEST_BYTES : (at + COPY_PAGES) * DIGEST_BYTES],
            groups=whole.groups[part],
            computed=min(computed, len(whole.pages[part])),
        )
        computed -= ready.computed
        yield worker_pb2.PullResponse(ready=ready)
