"""The gRPC door: twostroke.v1.Inference, all that clients may call."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio

from router.frontend.auth.auth import Doorman, Visit
from router.frontend.grpc.schema import options_of
from router.frontend.params import Ask, TokenPrompt, check_request_id, check_salt, priority_class
from router.frontend.preparation.prepare import PreparedGenerate
from router.frontend.request_handler import Front, TextEvent
from router.frontend.resume import Progress, Pulse, StreamPoint
from router.frontend.text.tokenizer import token_text
from twostroke.errors import UnsupportedFeature
from twostroke.request import SampledToken
from twostroke.rpc.channel import call_timeout_s
from twostroke.rpc.entrance import Context
from twostroke.rpc.v1 import inference_pb2
from twostroke.tracing.context import HEADER as TRACE_HEADER

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class Visits:
    """Calls that the doorman has let in, until they end: he is asked before a call's message is read."""

    def __init__(self, doorman: Doorman) -> None:
        self._doorman = doorman
        self._open: dict[Context, Visit] = {}

    @contextlib.contextmanager
    def admit(self, context: Context) -> Iterator[None]:
        """Raises InvalidApiKey or RateLimitExceeded."""
        shown = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), None)
        with self._doorman.admit(shown.decode(errors="replace") if isinstance(shown, bytes) else shown) as visit:
            self._open[context] = visit
            try:
                yield
            finally:
                del self._open[context]

    def of(self, context: Context) -> Visit:
        return self._open[context]


class InferenceService:
    """Who comes here has been let in. Messages with prompts arrive as bytes: to parse a large one takes long."""

    def __init__(self, front: Front, visits: Visits) -> None:
        self._front = front
        self._visits = visits

    async def Generate(  # noqa: N802
        self, raw: bytes, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        received_s, visit = time.monotonic(), self._visits.of(context)
        prepared = await self._front.prepare("grpc_generate", raw, visit, client=_client(context))
        assert isinstance(prepared, PreparedGenerate)
        request = inference_pb2.GenerateRequest.FromString(prepared.message)
        ask = _parse_ask(request, prepared.prompt, context.time_remaining(), visit, received_s, _traceparent(context))
        progress, has_begun = Progress(ask.point), ask.point.resumptions > 0

        async def beat() -> None:
            if has_begun:
                await context.write(inference_pb2.GenerateResponse(request_id=ask.request_id))

        pulse = Pulse(beat)
        last: list[inference_pb2.GenerateResponse] = []

        async def send(event: TextEvent) -> None:
            nonlocal has_begun
            if event.is_sent:
                return
            message = self._message(ask.request_id, event)
            sent = progress.sent_token if event.finish is None else progress.finished
            message.resume_token = sent(event.choice)
            if event.usage is None:
                async with pulse.turns:
                    await context.write(message)
                    pulse.sent()
                has_begun = True
            else:
                last.append(message)

        # Messages are written from inside the call, not yielded, so that a client that goes away cancels the answer
        # wherever it stands.
        await pulse.during(self._front.answer(ask, send))
        for message in last:
            yield message

    async def Tokenize(self, raw: bytes, context: Context) -> bytes:  # noqa: N802
        """The serialized response."""
        visit = self._visits.of(context)
        response = await self._front.prepare("grpc_tokenize", raw, visit, client=_client(context))
        assert isinstance(response, bytes)
        return response

    async def Abort(  # noqa: N802
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        found = await self._front.abort(request.request_id, request.resume_token, self._visits.of(context))
        return inference_pb2.AbortResponse(found=found)

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        del request, context
        facts = self._front.dispatcher.facts
        return inference_pb2.GetModelResponse(
            model=self._front.model,
            max_model_len=facts.context_tokens,
            vocab_size=facts.vocab_size,
            recommended_sampling=inference_pb2.SamplingOptions(**dataclasses.asdict(self._front.recommended)),
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        written = inference_pb2
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.Generate, response_serializer=written.GenerateResponse.SerializeToString
            ),
            "Tokenize": grpc.unary_unary_rpc_method_handler(self.Tokenize),
            "Abort": grpc.unary_unary_rpc_method_handler(
                self.Abort, written.AbortRequest.FromString, written.AbortResponse.SerializeToString
            ),
            "GetModel": grpc.unary_unary_rpc_method_handler(
                self.GetModel, written.GetModelRequest.FromString, written.GetModelResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    def _message(self, request_id: str, event: TextEvent) -> inference_pb2.GenerateResponse:
        message = inference_pb2.GenerateResponse(request_id=request_id, index=event.choice, text=event.text)
        if event.token is not None:
            message.token_ids.append(event.token.token)
            if event.token.logprob is not None:
                message.logprobs.append(self._logprob(event.token))
        if event.finish is not None:
            message.finish_reason = event.finish.value
        if event.usage is not None:
            message.usage.prompt_tokens = event.usage.prompt_tokens
            message.usage.completion_tokens = event.usage.completion_tokens
            message.usage.cached_tokens = event.usage.cached_tokens
        return message

    def _logprob(self, token: SampledToken) -> inference_pb2.TokenLogprob:
        assert token.logprob is not None
        return inference_pb2.TokenLogprob(
            token_id=token.token,
            token=token_text(self._front.text, token.token),
            logprob=token.logprob,
            top=[
                inference_pb2.TokenLogprob(token_id=other, token=token_text(self._front.text, other), logprob=logprob)
                for other, logprob in token.top
            ],
        )


def _parse_ask(
    request: inference_pb2.GenerateRequest,
    prompt: TokenPrompt,
    left_s: float | None,
    visit: Visit,
    received_s: float,
    traceparent: str = "",
) -> Ask:
    if request.sampling.HasField("prompt_logprobs"):
        raise UnsupportedFeature("prompt_logprobs is not supported by this server", field="prompt_logprobs")
    options = options_of(request)
    request_id = check_request_id(request.request_id, "request_id") or uuid.uuid4().hex
    tenant = visit.tenant_of(check_request_id(request.tenant, "tenant"), "tenant")
    mark = visit.marks(tenant)
    if request.resume_from:
        point = StreamPoint.after(request.resume_from, options.n, "resume_from", mark)
    else:
        point = StreamPoint.begin(request_id, options.n, mark)
    return Ask(
        point=point,
        is_resumable=True,
        is_id_drawn=not request.request_id,
        model=request.model or None,
        prompts=(prompt,),
        options=options,
        cache_salt=check_salt(request.cache_salt),
        deadline_s=None if left_s is None else time.time() + call_timeout_s(left_s),
        priority=min(priority_class(request.priority), visit.max_priority),
        tenant=tenant,
        visit=visit,
        traceparent=traceparent,
        received_s=received_s,
    )


def _client(context: Context) -> str:
    """The address that it calls from, of gRPC's `ipv4:127.0.0.1:5`."""
    return context.peer().partition(":")[2].rpartition(":")[0]


def _traceparent(context: Context) -> str:
    shown = next((value for key, value in context.invocation_metadata() or () if key == TRACE_HEADER), "")
    return shown if isinstance(shown, str) else shown.decode("ascii", "replace")
