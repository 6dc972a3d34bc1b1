"""Library types <-> messages. The one place that knows both."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from google.protobuf.message import Message

from twostroke.base import errors
from twostroke.base.errors import InternalError, InvalidRequest, ServeError
from twostroke.base.ids import BlockHash, RequestId
from twostroke.kv_cache.block import HASH_BYTES
from twostroke.kv_cache.form import KvForm
from twostroke.kv_cache.parts import GroupKind, Part
from twostroke.request import (
    Attempt,
    CacheHint,
    GenerateRequest,
    Grammar,
    PromptLogprobs,
    SampledToken,
    SamplingParams,
    WeightsRef,
)
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import control_pb2, worker_pb2
from twostroke.tracing.span import TraceContext, header_of

WEIGHTS_DIGEST_BYTES = 16


def hashes_to_bytes(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def hashes_from_bytes(packed: bytes) -> list[BlockHash]:
    if len(packed) % HASH_BYTES:
        raise InvalidRequest(
            f"block_hashes must be a multiple of {HASH_BYTES} bytes, got {len(packed)}", field="block_hashes"
        )
    return [BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)]


def wanted_pages(parts: Iterable[Part]) -> list[worker_pb2.WantedPages]:
    """Returns the messages of these parts, which are in order."""
    blocks: dict[GroupKind, list[int]] = {}
    for block, group in parts:
        blocks.setdefault(group, []).append(block)
    return [worker_pb2.WantedPages(group=group, blocks=own) for group, own in sorted(blocks.items())]


def form_of(model: control_pb2.ModelInfo) -> KvForm:
    """Returns the form of the pages of the worker, or of the decode workers, that say this of themselves."""
    return KvForm(model.kv_format, model.kv_converted_from or None)


def sampling_to_message(params: SamplingParams) -> worker_pb2.Sampling:
    message = worker_pb2.Sampling(**_SAMPLING.values_of(params))
    if params.logit_bias:
        message.bias_tokens.extend(token for token, _ in params.logit_bias)
        message.bias_values.extend(bias for _, bias in params.logit_bias)
    if params.grammar is not None:
        message.grammar = params.grammar.source
    return message


def sampling_from_message(message: worker_pb2.Sampling) -> SamplingParams:
    tokens, values = message.bias_tokens, message.bias_values
    if len(tokens) != len(values):
        raise InvalidRequest(f"{len(tokens)} tokens have {len(values)} biases", field="sampling.bias_tokens")
    return SamplingParams(
        **_SAMPLING.values_in(message),
        logit_bias=tuple(zip(tokens, values, strict=True)),
        grammar=Grammar(message.grammar) if message.grammar else None,
    )


def request_to_message(request: GenerateRequest) -> worker_pb2.Request:
    return worker_pb2.Request(
        **_REQUEST.values_of(request),
        sampling=sampling_to_message(request.sampling),
        weights=weights_to_message(request.weights),
        hints=[worker_pb2.CacheHint(blocks=hint.blocks, seconds=hint.seconds) for hint in request.hints],
    )


def request_from_message(message: worker_pb2.Request) -> GenerateRequest:
    return GenerateRequest(
        **_REQUEST.values_in(message),
        sampling=sampling_from_message(message.sampling),
        weights=weights_from_message(message.weights) if message.HasField("weights") else None,
        hints=tuple(CacheHint(hint.blocks, hint.seconds) for hint in message.hints),
    )


def attempt_to_message(
    attempt: Attempt,
    *,
    fingerprint: str,
    worker_epoch: str,
    source: worker_pb2.PageSource | None,
    peer: PeerPrefix | None = None,
    source_forecast: worker_pb2.SourceForecast | None = None,
) -> worker_pb2.OpenRequest:
    message = worker_pb2.OpenRequest(
        request=request_to_message(attempt.request),
        request_id=attempt.request_id,
        attempt=attempt.number,
        router_id=attempt.router_id,
        fingerprint=fingerprint,
        worker_epoch=worker_epoch,
        emitted=tokens_to_messages(attempt.emitted),
        block_hashes=hashes_to_bytes(attempt.block_hashes),
        source=source,
        source_forecast=source_forecast,
        traceparent=header_of(attempt.trace),
    )
    if peer is not None:
        peer.put(message)
    return message


def attempt_from_message(message: worker_pb2.OpenRequest) -> Attempt:
    return Attempt(
        request=request_from_message(message.request),
        request_id=RequestId(message.request_id),
        number=message.attempt,
        emitted=tuple(token_from_message(token) for token in message.emitted),
        block_hashes=tuple(hashes_from_bytes(message.block_hashes)),
        router_id=message.router_id,
        trace=TraceContext.parse(message.traceparent),
    )


class _SameFields:
    """Fields that a dataclass and its message have under one name and in one form."""

    def __init__(self, of: type, message: type[Message], *, apart: Collection[str]) -> None:
        """`apart` names fields that are converted otherwise. Raises KeyError for others that the message lacks."""
        described = message.DESCRIPTOR.fields_by_name
        self._names = tuple(each.name for each in dataclasses.fields(of) if each.name not in apart)
        self._lists = tuple(name for name in self._names if described[name].is_repeated)
        self._optional = tuple(name for name in self._names if described[name].has_presence)
        self._plain = tuple(name for name in self._names if name not in {*self._lists, *self._optional})

    def values_of(self, value: object) -> dict[str, Any]:
        return {name: getattr(value, name) for name in self._names}

    def values_in(self, message: Message) -> dict[str, Any]:
        values: dict[str, Any] = {name: getattr(message, name) for name in self._plain}
        for name in self._lists:
            values[name] = tuple(getattr(message, name)[:])  # a slice is copied in C, an iterator is asked each time
        for name in self._optional:
            values[name] = getattr(message, name) if message.HasField(name) else None
        return values


_SAMPLING = _SameFields(SamplingParams, worker_pb2.Sampling, apart={"logit_bias", "grammar"})
_REQUEST = _SameFields(GenerateRequest, worker_pb2.Request, apart={"sampling", "weights", "hints"})


def weights_to_message(weights: WeightsRef | None) -> worker_pb2.Weights | None:
    return None if weights is None else worker_pb2.Weights(digest=weights.digest, path=weights.path)


def weights_from_message(message: worker_pb2.Weights) -> WeightsRef:
    """Raises InvalidRequest for what is not a digest: it names files."""
    if len(message.digest) != WEIGHTS_DIGEST_BYTES:
        raise InvalidRequest(f"the digest of weights has {WEIGHTS_DIGEST_BYTES} bytes", field="weights.digest")
    return WeightsRef(message.digest, message.path)


def tokens_to_messages(tokens: Sequence[SampledToken]) -> list[worker_pb2.Token]:
    return [
        worker_pb2.Token(
            id=sampled.token,
            logprob=sampled.logprob,
            top=[worker_pb2.TopLogprob(id=token, logprob=logprob) for token, logprob in sampled.top],
        )
        for sampled in tokens
    ]


def token_from_message(message: worker_pb2.Token) -> SampledToken:
    return SampledToken(
        token=message.id,
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple((entry.id, entry.logprob) for entry in message.top),
    )


def prompt_logprobs_to_message(scores: PromptLogprobs) -> worker_pb2.PromptLogprobs:
    return worker_pb2.PromptLogprobs(
        logprobs=scores.logprobs, ordinals=scores.ordinals, top_ids=scores.top_ids, top_logprobs=scores.top_logprobs
    )


def prompt_logprobs_from_message(message: worker_pb2.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs.of(message.logprobs, message.ordinals, message.top_ids, message.top_logprobs)


def error_to_message(error: ServeError) -> worker_pb2.ErrorInfo:
    return worker_pb2.ErrorInfo(kind=type(error).__name__, message=error.message, field=error.field or "")


def error_from_message(message: worker_pb2.ErrorInfo) -> ServeError:
    return rebuild_error(message.kind, message.message, message.field or None)


def rebuild_error(kind: str, message: str, field: str | None) -> ServeError:
    """Returns the error another process named; one it invented becomes an InternalError."""
    known = {
        cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ServeError)
    }
    return known.get(kind, InternalError)(message, field=field)
