"""A frontend with real ports around a dispatcher that plays a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc.aio
import httpx
import pytest
from openai import AsyncOpenAI

from router.branches import BRANCHES
from router.endpoints.app import build_http_app
from router.fleet.named_models import NamedModels
from router.fleet.token_stream import TokenDelta
from router.fleet.worker import ServingFacts, Worker
from router.kserve.pages import KServePages
from router.metrics import RouterMetrics
from router.requests.request_handler import RequestHandler
from router.server_branch import RouterTable
from router.serving.parent_request import ParentRequest, Take, take_none
from router.text.tokenizer import ByteText, Text
from tests.hand_cut import HandCutTransport
from tests.inline_preparer import InlinePreparer
from tests.listener_thread import QuickRouterServer
from twostroke.base.errors import Cancelled, PeerLost, ServeError
from twostroke.base.ids import BlockHash, WorkerId
from twostroke.config import EndpointsConfig, ListenConfig, RouterConfig, RoutingConfig
from twostroke.config.output import OutputConfig
from twostroke.kv_cache.form import KvForm
from twostroke.request import FinishReason, GenerateRequest, PromptLogprobs, SampledToken
from twostroke.rpc.traces import known_of
from twostroke.rpc.v1 import control_pb2
from twostroke.tracing.recorder import Recorder

FACTS = ServingFacts(
    model="toy",
    max_model_len=256,
    vocab_size=300,
    eos_token_ids=(299,),
    block_size=16,
    pool_tokens=512,
    pool_pages=32,
    page_bytes=1024,
    dtype="float32",
    kv_form=KvForm("float32"),
    fingerprint="toy/1",
)


def _plain(text: str) -> list[SampledToken]:
    return [SampledToken(byte) for byte in text.encode()]


def scores_of(request: GenerateRequest) -> PromptLogprobs:
    """Token i of a prompt has logprob -i and rank i; the likeliest at its place are the tokens behind it."""
    top = request.sampling.prompt_logprobs or 0
    places = range(1, len(request.prompt))
    likeliest = [request.prompt[place] + rank for place in places for rank in range(1, top + 1)]
    values = [-float(rank) for _ in places for rank in range(top)]
    return PromptLogprobs.of([-float(place) for place in places], places, likeliest, values)


@dataclass
class ScriptedDispatcher:
    """Answers every choice with the tokens of `script`, one of each choice in turn."""

    facts_now: ServingFacts | None = FACTS
    script: Callable[[GenerateRequest, int], Sequence[SampledToken]] = lambda request, index: _plain("hello")
    reason: FinishReason = FinishReason.LENGTH
    cached_tokens: int = 3
    failure: ServeError | None = None
    failure_after: int = 0
    """Tokens of each choice before `failure` is raised or, with `stalls`, before nothing more comes."""
    stalls: bool = False
    is_draining: bool = False
    named_models: NamedModels = field(default_factory=dict)
    drained_until_s: float | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    """What was wanted of each prompt."""
    parents: list[ParentRequest] = field(default_factory=list)
    fleet: list[Worker] = field(default_factory=list)
    held: dict[WorkerId, tuple[int, ...]] = field(default_factory=dict)
    """Leading blocks of every prompt that workers hold, down to each tier."""
    recorder: Recorder = field(default_factory=lambda: Recorder("router-0"))
    early: list[tuple[str, int]] = field(default_factory=list)
    open_ids: set[str] = field(default_factory=set)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    two_open: asyncio.Event = field(default_factory=asyncio.Event)
    _aborted: dict[str, asyncio.Event] = field(default_factory=dict)

    async def wait_for_named(self, holds: Callable[[NamedModels], bool], timeout_s: float) -> None:
        assert holds(self.named_models)

    @property
    def facts(self) -> ServingFacts:
        if self.facts_now is None:
            raise PeerLost("no decode worker is known")
        return self.facts_now

    @property
    def operations(self) -> ScriptedDispatcher:
        return self

    @property
    def is_ready(self) -> bool:
        return self.facts_now is not None

    @property
    def knows_decode_worker(self) -> bool:
        return self.facts_now is not None

    async def generate(self, request: ParentRequest, take: Take = take_none) -> AsyncIterator[tuple[int, TokenDelta]]:
        self.parents.append(request)
        self.requests.append(request.request)
        self.open_ids.add(request.request_id)
        self.all_closed.clear()
        if len(self.open_ids) == 2:
            self.two_open.set()
        self._aborted[request.request_id] = asyncio.Event()
        try:
            async for event in self._play(request):
                if event[1].finish is not None or not take(*event):
                    yield event
        finally:
            self.open_ids.discard(request.request_id)
            if not self.open_ids:
                self.all_closed.set()

    async def _play(self, request: ParentRequest) -> AsyncIterator[tuple[int, TokenDelta]]:
        answers = {choice: list(self.script(request.request, choice)) for choice in range(request.n)}
        position = 0
        while answers:
            if position == self.failure_after and self.failure is not None:
                raise self.failure
            if position == self.failure_after and self.stalls:
                self.stalled.set()
                await self._aborted[request.request_id].wait()
                raise Cancelled("aborted")
            for index in list(answers):
                if (request.request_id, index) in self.early:
                    del answers[index]
                    yield index, TokenDelta(position, (), FinishReason.STOP, self.cached_tokens)
                elif position == min(len(answers[index]), request.request.sampling.max_tokens):
                    del answers[index]
                    yield index, TokenDelta(position, (), self.reason, self.cached_tokens)
                else:
                    scores = scores_of(request.request) if position == 0 and request.request.scores_prompt else None
                    cached = 0 if position else self.cached_tokens
                    token = answers[index][position]
                    yield index, TokenDelta(position, (token,), cached_tokens=cached, prompt_logprobs=scores)
            await asyncio.sleep(0)
            position += 1

    def finish_early(self, request: ParentRequest, index: int) -> None:
        self.early.append((request.request_id, index))

    async def abort(self, request_id: str) -> bool:
        if request_id not in self.open_ids:
            return False
        self._aborted[request_id].set()
        return True

    async def abort_elsewhere(self, request_id: str, resume_token: str, tenant: str | None) -> bool:
        return False

    def loads(self) -> list[control_pb2.WorkerLoad]:
        return [control_pb2.WorkerLoad(worker_id="decode-0", load=control_pb2.Load(running=7))]

    def workers(self) -> list[Worker]:
        return self.fleet

    def holders(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, tuple[int, ...]]:
        return {worker: tuple(min(len(hashes), depth) for depth in depths) for worker, depths in self.held.items()}

    async def trace(self, name: str) -> control_pb2.GetTraceResponse:
        return known_of(self.recorder, name)

    async def subscribe(self, request: control_pb2.SubscribeKvEventsRequest) -> AsyncIterator[control_pb2.KvEventBatch]:
        yield control_pb2.KvEventBatch(worker_id=request.worker_id, snapshot=True)

    async def forget_cached(self) -> control_pb2.ForgetCachedResponse:
        return control_pb2.ForgetCachedResponse(blocks=7, pinned=2)

    async def drain(self, deadline_s: float) -> int:
        self.drained_until_s = deadline_s
        self.is_draining = True
        return len(self.open_ids)


@dataclass
class Frontend:
    dispatcher: ScriptedDispatcher
    metrics: RouterMetrics
    http: httpx.AsyncClient
    url: str
    openai: AsyncOpenAI
    channel: grpc.aio.Channel
    admin: grpc.aio.Channel
    grpc_address: str
    """Address of `channel`."""
    admin_address: str
    """Address of `admin`."""

    def limit(self, **facts: int) -> None:
        """Changes what the workers say about themselves."""
        assert self.dispatcher.facts_now is not None
        self.dispatcher.facts_now = replace(self.dispatcher.facts_now, **facts)


@pytest.fixture
async def app() -> AsyncIterator[tuple[ScriptedDispatcher, httpx.AsyncClient]]:
    """The HTTP application without a server around it, for the many cases that end before dispatch."""
    dispatcher = ScriptedDispatcher()
    handler = RequestHandler(dispatcher, InlinePreparer(ByteText()), RouterMetrics(), model="toy")
    transport = httpx.ASGITransport(build_http_app(handler, max_body_bytes=1 << 16, pages=KServePages(handler).pages()))
    async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
        yield dispatcher, http


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    async with open_frontend(EndpointsConfig(max_request_bytes=1 << 16)) as opened:
        yield opened


@asynccontextmanager
async def open_frontend(
    endpoints: EndpointsConfig,
    fleet_address: str = "",
    cluster_token: str = "",
    output: OutputConfig | None = None,
    branches: RouterTable = BRANCHES,
    text: Text | None = None,
) -> AsyncIterator[Frontend]:
    """`output`: how answers are taken apart. `text`: that of the model; without it, text is bytes."""
    dispatcher, metrics = ScriptedDispatcher(), RouterMetrics()
    config = RouterConfig(
        listen=ListenConfig(http_port=0, grpc_port=0),
        served_model_name="toy",
        routing=RoutingConfig(seed=1),
        endpoints=endpoints,
        fleet_address=fleet_address,
        cluster_token=cluster_token,
    )
    preparer = InlinePreparer(text or ByteText(output), metrics)
    server = QuickRouterServer(
        config, dispatcher, preparer, metrics, router_id="router-0", recorder=dispatcher.recorder, branches=branches
    )
    url = f"http://{server.addresses.http}"
    async with (
        server.serving(),
        httpx.AsyncClient(base_url=url, timeout=60, transport=HandCutTransport()) as http,
        httpx.AsyncClient(timeout=60, transport=HandCutTransport()) as below,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, http_client=below) as client,
        grpc.aio.insecure_channel(server.addresses.grpc) as channel,
        grpc.aio.insecure_channel(server.addresses.admin) as admin,
    ):
        addresses = server.addresses
        yield Frontend(dispatcher, metrics, http, url, client, channel, admin, addresses.grpc, addresses.admin)
