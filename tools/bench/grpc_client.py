"""A client of our own gRPC API: twostroke.v1.Inference/Generate with token ids, words or a chat message."""

from __future__ import annotations

from functools import partial

import grpc
import grpc.aio

from cluster.flags.client_credentials import authorization
from tools.bench.client import AnswerRecorder, Client, Clock, ReportedUsage, Send
from tools.bench.load import PlannedRequest, Speller
from tools.bench.measure import Answer
from tools.bench.options import DEFAULT_VOCAB_SIZE, Target
from tools.clients.connect import tls_endpoint
from twostroke.base.errors import PeerLost
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


class GrpcClient(Client):
    """All requests share one connection."""

    def __init__(self, target: Target, speller: Speller, clock: Clock) -> None:
        assert target.grpc is not None
        self._target = target
        self._speller = speller
        self._clock = clock
        self._channel = _open(target)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = tuple(authorization(target.api_key or "").items())

    async def close(self) -> None:
        await self._channel.close()

    def prepare(self, planned: PlannedRequest) -> Send:
        request = inference_pb2.GenerateRequest(
            model=self._target.model or "",
            sampling=inference_pb2.SamplingOptions(temperature=self._target.temperature),
            stop=inference_pb2.StopOptions(max_tokens=planned.output_tokens, ignore_eos=self._target.ignore_eos),
        )
        if self._target.chat:
            request.chat.messages.add(role="user", content=self._speller.text(planned.prompt))
        elif self._target.text:
            request.text = self._speller.text(planned.prompt)
        else:
            request.token_ids.ids.extend(self._speller.token_ids(planned.prompt))
        return partial(self._send, request)

    async def _send(self, request: inference_pb2.GenerateRequest) -> Answer:
        recorder = AnswerRecorder(self._clock)
        finished = False
        try:
            async for message in self._inference.Generate(
                request, timeout=self._target.timeout_s, metadata=self._metadata
            ):
                if message.token_ids:
                    recorder.token_event(self._clock(), len(message.token_ids))
                if message.HasField("usage"):
                    usage = message.usage
                    recorder.usage = ReportedUsage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
                finished = finished or bool(message.finish_reason)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return recorder.failed("timeout", f"no complete answer after {self._target.timeout_s:g} s")
            return recorder.failed(f"grpc {error.code().name}", error.details() or error.code().name)
        if not finished:
            return recorder.failed("incomplete", "the stream ended without a finish reason")
        return recorder.completed()


async def served_vocab_size(target: Target) -> int:
    """Returns the vocabulary size that the server reports, or the default where it does not. Raises PeerLost."""
    async with _open(target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            metadata = tuple(authorization(target.api_key or "").items())
            info = await stub.GetModel(inference_pb2.GetModelRequest(), timeout=10, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return DEFAULT_VOCAB_SIZE
            raise PeerLost(f"no server at {target.grpc}: {error.details()}", field="grpc") from error
    return info.vocab_size or DEFAULT_VOCAB_SIZE


def _open(target: Target) -> grpc.aio.Channel:
    assert target.grpc is not None
    if target.tls is None:
        return grpc.aio.insecure_channel(target.grpc, options=list(_OPTIONS))
    tls_channel = tls_endpoint(target.tls)
    return grpc.aio.secure_channel(target.grpc, tls_channel.credentials, options=[*_OPTIONS, *tls_channel.options])
