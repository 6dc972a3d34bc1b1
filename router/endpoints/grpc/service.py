"""The gRPC endpoint for clients: twostroke.v1.Inference."""

# ruff: noqa: N802  # methods have the names that the .proto gives them

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio

from router.auth.auth import AuthContext
from router.dialects.grpc.schema import GenerateBody, add_output
from router.dialects.openai.reply import finish_reason
from router.dialects.openai.tool_calls import has_calls
from router.endpoints.grpc.calls import AuthenticatedCalls, QueuedWriter, client_address, shown_metadata
from router.endpoints.grpc.named_tenant import named_tenant
from router.requests.client_request import ClientRequest
from router.requests.params import check_request_id
from router.requests.request_handler import RequestHandler
from router.requests.resume import SentProgress, StreamPoint, with_pulse
from router.requests.work import BesideBody
from router.text.output.events import TextEvent
from router.text.tokenizer import Text, token_text
from twostroke.request import PromptLogprobs, SampledToken
from twostroke.rpc.channel import call_timeout_s
from twostroke.rpc.entrance import Context
from twostroke.rpc.v1 import inference_pb2
from twostroke.tracing.span import HEADER as TRACE_HEADER

SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


class InferenceService:
    """Serves authenticated calls. Messages with prompts are parsed by preparation: for a large one that takes long."""

    def __init__(self, handler: RequestHandler, calls: AuthenticatedCalls) -> None:
        self._handler = handler
        self._calls = calls

    async def Generate(self, raw: bytes, context: Context) -> AsyncIterator[inference_pb2.GenerateResponse]:
        received_s, auth = time.monotonic(), self._calls.auth_of(context)
        tenant = named_tenant(raw)
        beside = BesideBody(tenant=None if tenant is None else check_request_id(tenant, "tenant"))
        body = await self._handler.prepare("grpc_generate", raw, auth, client=client_address(context), beside=beside)
        assert isinstance(body, GenerateBody)
        request = _client_request(body, auth, context, received_s)
        messages = _Messages(request, self._handler.text, context)
        has_begun, dispatcher, writer = request.point.resumptions > 0, self._handler.dispatcher, messages.writer
        # Messages are written in the call, not yielded, so that a client that disconnects cancels the answer at any
        # point.
        answering = self._handler.answer(request, messages)
        try:
            await with_pulse(
                answering, writer, lambda: (has_begun or writer.is_started) and dispatcher.knows_decode_worker
            )
        finally:
            await writer.close()
        if messages.last is not None:
            yield messages.last

    async def Tokenize(self, raw: bytes, context: Context) -> bytes:
        return await self._prepared("grpc_tokenize", raw, context)

    async def Detokenize(self, raw: bytes, context: Context) -> bytes:
        return await self._prepared("grpc_detokenize", raw, context)

    async def _prepared(self, kind: str, raw: bytes, context: Context) -> bytes:
        """Returns the serialized response to a message that needs only preparation."""
        auth = self._calls.auth_of(context)
        response = await self._handler.prepare(kind, raw, auth, client=client_address(context))
        assert isinstance(response, bytes)
        return response

    async def Abort(self, request: inference_pb2.AbortRequest, context: Context) -> inference_pb2.AbortResponse:
        found = await self._handler.abort(request.request_id, request.resume_token, self._calls.auth_of(context))
        return inference_pb2.AbortResponse(found=found)

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        facts = self._handler.dispatcher.facts
        return inference_pb2.GetModelResponse(
            model=self._handler.model,
            max_model_len=facts.context_tokens,
            vocab_size=facts.vocab_size,
            recommended_sampling=inference_pb2.SamplingOptions(**dataclasses.asdict(self._handler.recommended)),
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        written = inference_pb2
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.Generate, response_serializer=written.GenerateResponse.SerializeToString
            ),
            "Tokenize": grpc.unary_unary_rpc_method_handler(self.Tokenize),
            "Detokenize": grpc.unary_unary_rpc_method_handler(self.Detokenize),
            "Abort": grpc.unary_unary_rpc_method_handler(
                self.Abort, written.AbortRequest.FromString, written.AbortResponse.SerializeToString
            ),
            "GetModel": grpc.unary_unary_rpc_method_handler(
                self.GetModel, written.GetModelRequest.FromString, written.GetModelResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


class _Messages:
    """The messages of one answer."""

    def __init__(self, request: ClientRequest, text: Text, context: Context) -> None:
        self._request_id = request.request_id
        self._prompts = [prompt.ids for prompt in request.body.token_prompts]
        self._text = text
        self._progress = SentProgress(request.point)
        beat = inference_pb2.GenerateResponse(request_id=self._request_id)
        self.writer: QueuedWriter[inference_pb2.GenerateResponse] = QueuedWriter(context.write, beat)
        self._with_calls: set[int] = set()
        """Choices in which a tool is called."""
        self.last: inference_pb2.GenerateResponse | None = None
        """The message that ends the stream."""
        self.flush = self.writer.flush
        self.drain = self.writer.drain

    @property
    def is_ready(self) -> bool:
        return self.writer.is_idle

    def put(self, event: TextEvent) -> None:
        if has_calls(event.parts or ()):
            self._with_calls.add(event.choice)
        if event.is_sent:
            return
        message = self._message(event)
        sent = self._progress.sent_token if event.finish is None else self._progress.finished
        message.resume_token = sent(event.choice)
        if event.usage is None:
            self.writer.put(message)
        else:
            self.last = message

    def _message(self, event: TextEvent) -> inference_pb2.GenerateResponse:
        message = inference_pb2.GenerateResponse(request_id=self._request_id, index=event.choice)
        add_output(message, event)
        if event.token is not None:
            message.token_ids.append(event.token.token)
            if event.token.logprob is not None:
                message.logprobs.append(self._logprob(event.token))
        if event.prompt_logprobs is not None:
            message.prompt_logprobs.extend(self._prompt_logprobs(event.prompt_logprobs))
        if event.finish is not None:
            message.finish_reason = finish_reason(event.finish, has_calls=event.choice in self._with_calls)
        if event.usage is not None:
            message.usage.CopyFrom(inference_pb2.Usage(**dataclasses.asdict(event.usage)))
        return message

    def _prompt_logprobs(self, scores: PromptLogprobs) -> Iterator[inference_pb2.TokenLogprob]:
        (ids,) = self._prompts
        for index, (token, logprob, position) in enumerate(zip(ids[1:], scores.logprobs, scores.ordinals, strict=True)):
            top = [SampledToken(other, value) for other, value in scores.top(index)]
            yield inference_pb2.TokenLogprob(
                token_id=token,
                token=token_text(self._text, token),
                logprob=logprob,
                rank=position,
                top=[self._logprob(other) for other in top],
            )

    def _logprob(self, token: SampledToken) -> inference_pb2.TokenLogprob:
        assert token.logprob is not None
        return inference_pb2.TokenLogprob(
            token_id=token.token,
            token=token_text(self._text, token.token),
            logprob=token.logprob,
            top=[
                inference_pb2.TokenLogprob(token_id=other, token=token_text(self._text, other), logprob=logprob)
                for other, logprob in token.top
            ],
        )


def _client_request(body: GenerateBody, auth: AuthContext, context: Context, received_s: float) -> ClientRequest:
    tenant, left_s = auth.tenant_of(body.tenant, "tenant"), context.time_remaining()
    mark, n = auth.marks(tenant), body.options.n
    if body.resume_from:
        point = StreamPoint.after(body.resume_from, n, "resume_from", mark)
    else:
        point = StreamPoint.begin(body.request_id or uuid.uuid4().hex, n, mark)
    return ClientRequest(
        body=body,
        point=point,
        is_resumable=True,
        is_id_drawn=not body.request_id,
        deadline_s=None if left_s is None else time.time() + call_timeout_s(left_s),
        tenant=tenant,
        auth=auth,
        client=client_address(context),
        traceparent=shown_metadata(context, TRACE_HEADER),
        received_s=received_s,
    )
