"""Serves inference over gRPC: one request with its whole answer, or a stream of requests with streamed responses.

ModelStreamInfer serves the requests of a stream concurrently. If one fails, it ends with an error message, and the
others continue.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid

from router.auth.auth import AuthContext
from router.dialects.kserve.infer import InferReply, id_of
from router.dialects.kserve.schema import KServeRequest
from router.endpoints.grpc.calls import AuthenticatedCalls, QueuedWriter, client_address, shown_metadata
from router.requests.client_request import ClientRequest
from router.requests.params import MAX_REQUEST_ID_CHARS, check_request_id
from router.requests.request_handler import RequestHandler
from router.requests.resume import StreamPoint
from router.requests.work import BesideBody
from router.text.output.events import TextEvent, WholeOutput
from twostroke.base.errors import (
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    ServeError,
    without_frames,
)
from twostroke.observability.bug_log import log_bug
from twostroke.rpc.channel import call_timeout_s
from twostroke.rpc.entrance import Context
from twostroke.rpc.v1 import kserve_pb2
from twostroke.tracing.span import HEADER as TRACE_HEADER

log = logging.getLogger(__name__)

KIND = "kserve_infer"
"""Kind of the requests in `router.preparation`."""
MOST_OPEN = 64
"""Most open requests of one stream. The next one is read only when one has ended."""
IDLE_S = 300.0
"""Seconds after which a stream without an open request ends: it takes memory, even for half a message."""
TENANT_KEY = "x-tenant-id"
"""Metadata key of the tenant, like the HTTP header. Gateways that know their clients set it."""
RETRYABLE, RETRY_AFTER = "retryable", "retry_after_ms"
"""Parameters of an error message: whether the request may be sent again, and after which time, if known."""


async def infer_whole(
    handler: RequestHandler, raw: bytes, auth: AuthContext, context: Context, received_s: float
) -> kserve_pb2.ModelInferResponse:
    """Returns the answer to one request. Raises ServeError."""
    wanted = await _prepared(handler, raw, auth, context)
    if wanted.stream:
        raise InvalidRequest("ModelInfer gives whole answers; ModelStreamInfer streams", field="stream")
    request = _client_request(wanted, auth, context, received_s)
    whole = await handler.answer_whole(request, lambda: WholeOutput(_reply(handler, wanted)))
    return whole.reply.response()


class RequestStream:
    """One call of ModelStreamInfer."""

    def __init__(self, handler: RequestHandler, calls: AuthenticatedCalls, context: Context) -> None:
        self._handler = handler
        self._calls = calls
        self._context = context
        self._turn = asyncio.Lock()
        """Held while a response is written: gRPC allows one write at a time."""
        self._places = asyncio.Semaphore(MOST_OPEN)
        self._open = 0
        self._idle = asyncio.timeout(IDLE_S)
        """It has no time to run out in while a request is open."""
        self._is_reading = True
        self._is_leaving = False

    def leave(self) -> None:
        """Ends the stream as soon as no request of it is open."""
        self._is_leaving = True
        self._note_idle()

    async def run(self) -> None:
        """Serves the stream until the client has sent its last request and has all responses.

        Raises DeadlineExceeded after `IDLE_S` without a request, and Draining if this router takes no new ones.
        """
        async with asyncio.TaskGroup() as group:
            try:
                async with self._idle:
                    await self._read(group)
            except TimeoutError:
                if not self._idle.expired():
                    raise
            finally:
                self._is_reading = False
        if self._is_leaving or self._handler.dispatcher.is_draining:
            raise Draining("this router takes no new requests: it is shutting down")
        if self._idle.expired():
            raise DeadlineExceeded(f"no request came for {IDLE_S:g} s: open another stream")

    async def _read(self, group: asyncio.TaskGroup) -> None:
        while isinstance(raw := await self._context.read(), bytes):
            self._open += 1
            self._idle.reschedule(None)
            await self._places.acquire()
            group.create_task(self._serve(raw))
            del raw  # it may be large, and the next request may be late
            if self._handler.dispatcher.is_draining:
                return

    async def _serve(self, raw: bytes) -> None:
        """Serves one request of the stream. Errors go to the client, and none is raised."""
        request_id, received_s = id_of(raw), time.monotonic()
        try:
            with self._calls.admit_request(self._context) as auth:
                await self._answer(raw, auth, received_s)
        except ServeError as error:
            await self._write(_failure(request_id, error))
        except Exception as error:
            log_bug(log, "internal error request=%s", request_id[:MAX_REQUEST_ID_CHARS], error=error)
            internal = InternalError(f"internal error: {type(error).__name__}: {error}")
            await self._write(_failure(request_id, internal))
        finally:
            self._places.release()
            self._open -= 1
            self._note_idle()

    def _note_idle(self) -> None:
        if self._is_reading and not self._open and not self._idle.expired():
            self._idle.reschedule(asyncio.get_running_loop().time() + (0 if self._is_leaving else IDLE_S))

    async def _answer(self, raw: bytes, auth: AuthContext, received_s: float) -> None:
        wanted = await _prepared(self._handler, raw, auth, self._context)
        del raw
        request = _client_request(wanted, auth, self._context, received_s)
        if not wanted.stream:
            whole = await self._handler.answer_whole(request, lambda: WholeOutput(_reply(self._handler, wanted)))
            for response in whole.reply.responses(is_last=True):
                await self._write(kserve_pb2.ModelStreamInferResponse(infer_response=response))
            return
        parts = _Parts(_reply(self._handler, wanted), QueuedWriter(self._write))
        try:
            await self._handler.answer(request, parts)
            await parts.drain()
        except ServeError:
            await parts.drain()  # sends the responses before the failure
            raise
        finally:
            await parts.close()

    async def _write(self, response: kserve_pb2.ModelStreamInferResponse) -> None:
        async with self._turn:
            await self._context.write(response)


class _Parts:
    """Writes the responses of one streamed answer."""

    def __init__(self, reply: InferReply, writer: QueuedWriter[kserve_pb2.ModelStreamInferResponse]) -> None:
        self._reply = reply
        self._writer = writer
        self.flush = writer.flush
        self.drain = writer.drain
        self.close = writer.close

    @property
    def is_ready(self) -> bool:
        return self._writer.is_idle

    def put(self, event: TextEvent) -> None:
        self._reply.add(event)
        if self._reply.says_nothing_yet:
            return
        for response in self._reply.responses(is_last=event.usage is not None):
            self._writer.put(kserve_pb2.ModelStreamInferResponse(infer_response=response))


async def _prepared(handler: RequestHandler, raw: bytes, auth: AuthContext, context: Context) -> KServeRequest:
    beside = BesideBody(tenant=_named_tenant(context))
    wanted = await handler.prepare(KIND, raw, auth, client=client_address(context), beside=beside)
    assert isinstance(wanted, KServeRequest)
    return wanted


def _named_tenant(context: Context) -> str:
    """Returns the tenant that a gateway names, after a check of its characters. Empty: none."""
    return check_request_id(shown_metadata(context, TENANT_KEY), TENANT_KEY)


def _reply(handler: RequestHandler, wanted: KServeRequest) -> InferReply:
    return InferReply(wanted, wanted.options.n, wanted.model or handler.model, handler.text)


def _client_request(wanted: KServeRequest, auth: AuthContext, context: Context, received_s: float) -> ClientRequest:
    tenant = auth.tenant_of(_named_tenant(context), TENANT_KEY)
    limits_s = [limit_s for limit_s in (context.time_remaining(), wanted.timeout_s) if limit_s is not None]
    return ClientRequest(
        body=wanted,
        point=StreamPoint.begin(wanted.id or uuid.uuid4().hex, wanted.options.n, auth.marks(tenant)),
        is_id_drawn=not wanted.id,
        may_rename=True,
        deadline_s=time.time() + call_timeout_s(min(limits_s)) if limits_s else None,
        tenant=tenant,
        auth=auth,
        client=client_address(context),
        traceparent=shown_metadata(context, TRACE_HEADER),
        received_s=received_s,
    )


def _failure(request_id: str, error: ServeError) -> kserve_pb2.ModelStreamInferResponse:
    """Returns an error message with the request's id, if that is valid, and whether to send the request again."""
    without_frames(error)
    is_id = len(request_id) <= MAX_REQUEST_ID_CHARS and request_id.isprintable()
    response = kserve_pb2.ModelInferResponse(id=request_id if is_id else "")
    response.parameters[RETRYABLE].bool_param = error.retryable
    if isinstance(error, Overloaded) and error.retry_after_s is not None:
        response.parameters[RETRY_AFTER].int64_param = math.ceil(error.retry_after_s * 1000)
    return kserve_pb2.ModelStreamInferResponse(error_message=error.message, infer_response=response)
