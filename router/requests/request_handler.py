"""The path that every request takes, whichever protocol it came by: prepared, checked, and given to the dispatcher."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
import uuid
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from router.admission.queued_request import Siblings
from router.auth.auth import AuthContext
from router.fleet.named_models import NamedModel
from router.fleet.worker import ServingFacts
from router.metrics import RouterMetrics
from router.requests.client_request import ClientRequest
from router.requests.compiled_grammars import CompiledGrammars
from router.requests.params import answer_length, check_model, check_prompt, check_prompt_length, sampling_params
from router.requests.request_output import OutputDependencies, OutputShare, RequestOutput
from router.requests.resume import Seeds, stream_of
from router.requests.work import NOTHING_BESIDE, BesideBody, Preparer, Work
from router.serving.dispatcher import RouterCore
from router.serving.parent_request import AnswerWeights, ParentRequest, until
from router.text.output.events import Sink
from router.text.prompts import PublicPrefixes, TokenPrompt
from twostroke.base.errors import (
    Cancelled,
    Draining,
    InternalError,
    InvalidRequest,
    ServeError,
    WeightsChanged,
)
from twostroke.base.fault_points import Point, reach
from twostroke.models.catalog.recommended import UNKNOWN, Recommended
from twostroke.observability.bug_log import log_bug, place_of
from twostroke.tracing.recorder import Recorder
from twostroke.tracing.span import TraceContext

log = logging.getLogger(__name__)

MOST_CHANGES = 2
"""How often a whole answer may begin again because weights were replaced. Each time takes a reload of the fleet."""

WholeSink = TypeVar("WholeSink", bound=Sink)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenIds:
    """The ids by which an open request can be aborted."""

    tenant: str | None
    """The tenant of the API key. None: no key was asked for."""
    parts: tuple[str, ...]
    """Ids of its prompts at the dispatcher."""
    is_id_enough: bool
    """Whether the request's id is enough to abort it."""


class RequestHandler:
    """Owns the ids of open requests; everything else about them belongs to the dispatcher."""

    def __init__(
        self,
        dispatcher: RouterCore,
        preparer: Preparer,
        metrics: RouterMetrics,
        *,
        model: str,
        seeds: Seeds | None = None,
        public: PublicPrefixes | None = None,
        recorder: Recorder | None = None,
        recommended: Recommended = UNKNOWN,
    ) -> None:
        """`recommended` is the sampling that the model's makers recommend. Clients can read it, it is not a default."""
        self.dispatcher = dispatcher
        self.text = preparer.text
        self.metrics = metrics
        self.model = model
        self.recommended = recommended
        self.public = public or PublicPrefixes()
        self._seeds = seeds or Seeds()
        self._recorder = recorder or Recorder()
        self.share = OutputShare()
        self._dependencies = OutputDependencies(dispatcher, self.text, metrics, self.share)
        self._preparer = preparer
        self._grammars = CompiledGrammars(preparer, metrics)
        self._open: dict[tuple[str | None, str], _OpenIds] = {}
        """Open requests by tenant of the API key, if any, and the client's request id."""
        self._streams: dict[str, _OpenIds] = {}
        """Open requests by name of the stream."""

    async def prepare(
        self,
        kind: str,
        body: bytes,
        auth: AuthContext,
        *,
        client: str,
        request_id: str = "",
        deadline_s: float | None = None,
        beside: BesideBody = NOTHING_BESIDE,
    ) -> Any:
        """Returns what preparation makes of a request. Tokens of a request that ends here are charged here.

        Clients without an API key's tenant take turns by `client`, their address. `request_id`, for the log, and
        `deadline_s`, in Unix seconds, are given if they are known before the body is read.
        """
        self._refuse_if_draining()
        dispatcher = self.dispatcher
        work = Work(
            kind,
            body,
            self.model,
            dispatcher.facts,
            frozenset(dispatcher.named_models),
            beside.path_fields,
            self.text.formats,
            beside.json_bytes,
            beside.tenant if auth.tenant is None else auth.tenant,
        )
        place = ""
        try:
            async with _until(deadline_s):
                outcome = await self._preparer.prepare(work, auth.tenant or client)
            if outcome.error is not None or isinstance(outcome.value, bytes):
                auth.spend(outcome.tokens)
            if outcome.error is not None:
                place = outcome.place
                raise outcome.error
        except ServeError as error:
            self.metrics.count_request(error.label())
            _log_failure(request_id, error, place)
            raise
        return outcome.value

    async def shared_prefix(self, body: bytes) -> tuple[array[int], int]:
        """Returns the tokens of the prefix in a serialized AddPinRequest, and how many of them are public.

        Raises InvalidRequest, or ContextLengthExceeded.
        """
        facts = self.dispatcher.facts
        outcome = await self._preparer.prepare(Work("shared_prefix", body, self.model, facts), "")
        if outcome.error is not None:
            raise outcome.error
        tokens: array[int] = outcome.value
        check_prompt(TokenPrompt(tokens), facts)
        return tokens, self.public.blocks_of(tokens, facts.block_size) * facts.block_size

    def named(self, model: str) -> NamedModel | None:
        """Returns the named model that is served under a name. None: it is the main model. Raises NotFound if nothing
        is served under the name.
        """
        check_model(model, self.model, self.dispatcher.named_models)
        return self.dispatcher.named_models.get(model)

    async def abort(self, request_id: str, resume_token: str, auth: AuthContext) -> bool:
        """Ends the request with that id, or that of the token's stream, at any router. Returns False if none has it.

        Without API keys, an id that a client chose is not enough, because others can guess it.
        """
        if await self.abort_here(request_id, resume_token, auth.tenant):
            return True
        return await self.dispatcher.operations.abort_elsewhere(request_id, resume_token, auth.tenant)

    async def abort_here(self, request_id: str, resume_token: str, tenant: str | None) -> bool:
        """Ends the request if it is open at this router. `tenant` is that of the API key."""
        by_id = self._open.get((tenant, request_id))
        opened = self._streams.get(stream_of(resume_token)) if resume_token else by_id
        if opened is None or opened.tenant != tenant or not (resume_token or opened.is_id_enough):
            return False
        aborted = [await self.dispatcher.abort(part) for part in opened.parts]
        return any(aborted)

    async def answer(self, request: ClientRequest, sink: Sink) -> None:
        """Gives every event of the output to `sink`. Raises ServeError. Cancelling it cancels the work on workers."""
        status = Cancelled.label()
        span = self._recorder.root("request", request.point.stream, request.traceparent)
        span.start_s -= time.monotonic() - request.received_s
        self.metrics.open_requests.inc()
        try:
            async with _until(request.deadline_s):
                request.auth.widen(request.open_choices)
                with self._registered(request) as ids:
                    with span.part("prepare") as part:
                        part.start_s = span.start_s
                        facts, requests = await self._requests(request, ids, span.context)
                        part.set(
                            prompts=len(requests), prompt_tokens=sum(len(each.request.prompt) for each in requests)
                        )
                    reach(Point.ROUTER_RECEIVED)
                    await RequestOutput(self._dependencies, request, requests, facts, sink).run()
            status = "ok"
        except asyncio.CancelledError:
            log.info("request cancelled request=%s", request.request_id)
            raise
        except ServeError as error:
            status = error.label()
            _log_failure(request.request_id, error)
            raise
        except Exception as error:
            status = InternalError.label()
            log_bug(log, "request failed by a bug request=%s", request.request_id, error=error)
            raise InternalError(f"internal error: {type(error).__name__}: {error}") from error
        finally:
            self.metrics.open_requests.dec()
            self.metrics.count_request(status)
            self.metrics.request_duration_seconds.observe(time.monotonic() - request.received_s)
            span.set(request_id=request.request_id, status=status, resumptions=request.point.resumptions)
            span.end(error=None if status == "ok" else status)

    async def answer_whole(self, request: ClientRequest, begin: Callable[[], WholeSink]) -> WholeSink:
        """Returns a sink that `begin` made, with every event of the output. Raises ServeError.

        If the weights are replaced during the answer, it begins again with the new ones and another sink, because the
        client has nothing of it yet.
        """
        for changes in itertools.count():
            sink = begin()
            try:
                await self.answer(request, sink)
                break
            except WeightsChanged:
                if changes == MOST_CHANGES:
                    raise
                log.info("begun anew with other weights request=%s", request.request_id)
                point = dataclasses.replace(request.point, weights=AnswerWeights())
                request = dataclasses.replace(request, point=point)
        return sink

    def _refuse_if_draining(self) -> None:
        if self.dispatcher.is_draining:
            raise Draining("this router takes no new requests: it is shutting down")

    async def _requests(
        self, request: ClientRequest, ids: tuple[str, ...], trace: TraceContext
    ) -> tuple[ServingFacts, tuple[ParentRequest, ...]]:
        """Makes one `ParentRequest` for each prompt, after every check that the frontend can make."""
        self._refuse_if_draining()
        facts, body, point = self.dispatcher.facts, request.body, request.point
        options, named, routing, grammar = body.options, self.named(body.model or ""), request.routing, None
        if options.structured is not None:
            compiled = await self._grammars.compiled(options.structured, request.fair_queue_key)
            grammar = compiled.grammar
            routing = dataclasses.replace(routing, compile_s=compiled.compile_s, mask_s=compiled.mask_s)
        requests = []
        for number, (request_id, prompt) in enumerate(zip(ids, body.token_prompts, strict=True)):
            sent = point.sent[number * options.n : (number + 1) * options.n]
            check_prompt_length(prompt, facts)  # its tokens were checked when it was prepared, and workers do it, too
            length = answer_length(prompt, options, facts, clamps=request.clamps_length)
            sampling = sampling_params(options, length, facts, self._seeds.seed_of(point, number), grammar)
            requests.append(
                ParentRequest(
                    request_id=request_id,
                    request=request.generate_request(prompt, sampling, facts, named, self.public),
                    n=options.n,
                    routing=routing,
                    siblings=Siblings(number * options.n, len(ids) * options.n),
                    resumptions=point.resumptions,
                    ended_choices=frozenset(choice for choice, one in enumerate(sent) if one.is_finished),
                    is_resumable=request.is_resumable,
                    weights=point.weights,
                    trace=trace,
                )
            )
            await asyncio.sleep(0)  # each of a thousand prompts takes a moment
        return facts, tuple(requests)

    @contextlib.contextmanager
    def _registered(self, request: ClientRequest) -> Iterator[tuple[str, ...]]:
        """Yields the dispatcher's ids of the request's prompts, and lets it be aborted by its ids until it ends."""
        name, point, tenant = request.request_id, request.point, request.auth.tenant
        if (tenant, name) in self._open and not point.resumptions:
            if not request.may_rename:
                raise InvalidRequest(f"request_id {name!r} is that of another open request", field="request_id")
            name = f"{name}-{uuid.uuid4().hex[:8]}"
        count = len(request.body.prompts)
        parts = tuple(f"{point.stream}/{prompt}" for prompt in range(count)) if count > 1 else (point.stream,)
        is_id_secret = request.is_id_drawn and not point.resumptions
        opened = _OpenIds(tenant=tenant, parts=parts, is_id_enough=tenant is not None or is_id_secret)
        self._open[tenant, name] = self._streams[point.stream] = opened
        try:
            yield parts
        finally:
            if self._open.get((tenant, name)) is opened:
                del self._open[tenant, name]
            if self._streams.get(point.stream) is opened:
                del self._streams[point.stream]


def _log_failure(request_id: str, error: ServeError, place: str = "") -> None:
    """Logs the class of an error and where it was raised, but not its message: that may quote what the client sent."""
    log.info("request failed request=%s error=%s at=%s", request_id, error.label(), place or place_of(error))


def _until(deadline_s: float | None) -> AbstractAsyncContextManager[None]:
    message = "the deadline passed before the answer was complete"
    return until(deadline_s, "the deadline had passed before the request came in", lambda: message)
