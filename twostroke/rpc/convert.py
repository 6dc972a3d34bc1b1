"""Library types <-> messages. The one place that knows both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twostroke import errors
from twostroke.errors import InternalError, InvalidRequest, ServeError
from twostroke.ids import BlockHash, RequestId
from twostroke.kv_cache.block import HASH_BYTES
from twostroke.kv_cache.form import KvForm
from twostroke.request import AdapterRef, CacheHint, Grammar, PromptLogprobs, Request, SampledToken, SamplingParams
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import adapters_pb2, control_pb2, worker_pb2
from twostroke.tracing.context import TraceContext, header_of

ADAPTER_DIGEST_BYTES = 16


def hashes_to_bytes(hashes: Iterable[BlockHash]) -> bytes:
    return b"".join(hashes)


def hashes_from_bytes(packed: bytes) -> list[BlockHash]:
    if len(packed) % HASH_BYTES:
        raise InvalidRequest(
            f"block_hashes must be a multiple of {HASH_BYTES} bytes, got {len(packed)}", field="block_hashes"
        )
    return [BlockHash(packed[start : start + HASH_BYTES]) for start in range(0, len(packed), HASH_BYTES)]


def form_of(model: control_pb2.ModelInfo) -> KvForm:
    """Return the form of the pages of the worker, or of the decode workers, that say this of themselves."""
    return KvForm(model.kv_format, model.kv_converted_from or None)


def sampling_to_message(params: SamplingParams) -> worker_pb2.Sampling:
    return worker_pb2.Sampling(
        seed=params.seed,
        max_tokens=params.max_tokens,
        choice=params.choice,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bias_tokens=[token for token, _ in params.logit_bias],
        bias_values=[bias for _, bias in params.logit_bias],
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        grammar="" if params.grammar is None else params.grammar.source,
    )


def sampling_from_message(message: worker_pb2.Sampling) -> SamplingParams:
    tokens, values = message.bias_tokens, message.bias_values
    if len(tokens) != len(values):
        raise InvalidRequest(f"{len(tokens)} tokens have {len(values)} biases", field="sampling.bias_tokens")
    return SamplingParams(
        seed=message.seed,
        max_tokens=message.max_tokens,
        choice=message.choice,
        temperature=message.temperature,
        top_k=message.top_k if message.HasField("top_k") else None,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple(zip(tokens, values, strict=True)),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=tuple(message.stop_token_ids),
        grammar=Grammar(message.grammar) if message.grammar else None,
    )


def request_to_message(
    request: Request,
    *,
    fingerprint: str,
    worker_epoch: str,
    source: worker_pb2.PageSource | None,
    peer: PeerPrefix | None = None,
    source_forecast: worker_pb2.SourceForecast | None = None,
) -> worker_pb2.OpenRequest:
    message = worker_pb2.OpenRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        router_id=request.router_id,
        fingerprint=fingerprint,
        worker_epoch=worker_epoch,
        prompt=request.prompt,
        emitted=tokens_to_messages(request.emitted),
        block_hashes=hashes_to_bytes(request.block_hashes),
        salt=request.salt,
        public_blocks=request.public_blocks,
        sampling=sampling_to_message(request.sampling),
        deadline_s=request.deadline_s,
        source=source,
        source_forecast=source_forecast,
        traceparent=header_of(request.trace),
        adapter=adapter_to_message(request.adapter),
        speculation=request.speculation,
        tenant=request.hint_tenant,
        hints=[worker_pb2.CacheHint(blocks=hint.blocks, seconds=hint.seconds) for hint in request.hints],
    )
    if peer is not None:
        peer.put(message)
    return message


def request_from_message(message: worker_pb2.OpenRequest) -> Request:
    return Request(
        request_id=RequestId(message.request_id),
        attempt=message.attempt,
        prompt=tuple(message.prompt),
        emitted=tuple(token_from_message(token) for token in message.emitted),
        block_hashes=tuple(hashes_from_bytes(message.block_hashes)),
        salt=message.salt,
        public_blocks=message.public_blocks,
        sampling=sampling_from_message(message.sampling),
        deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
        router_id=message.router_id,
        trace=TraceContext.parse(message.traceparent),
        adapter=adapter_from_message(message.adapter) if message.HasField("adapter") else None,
        speculation=message.speculation,
        hint_tenant=message.tenant,
        hints=tuple(CacheHint(hint.blocks, hint.seconds) for hint in message.hints),
    )


def adapter_to_message(adapter: AdapterRef | None) -> adapters_pb2.Adapter | None:
    return None if adapter is None else adapters_pb2.Adapter(digest=adapter.digest, path=adapter.path)


def adapter_from_message(message: adapters_pb2.Adapter) -> AdapterRef:
    """Raises InvalidRequest for what is no digest: it names files."""
    if len(message.digest) != ADAPTER_DIGEST_BYTES:
        raise InvalidRequest(f"the digest of an adapter has {ADAPTER_DIGEST_BYTES} bytes", field="adapter.digest")
    return AdapterRef(message.digest, message.path)


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
        logprobs=scores.logprobs, ranks=scores.ranks, top_ids=scores.top_ids, top_logprobs=scores.top_logprobs
    )


def prompt_logprobs_from_message(message: worker_pb2.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs.of(message.logprobs, message.ranks, message.top_ids, message.top_logprobs)


def error_to_message(error: ServeError) -> worker_pb2.ErrorInfo:
    return worker_pb2.ErrorInfo(kind=type(error).__name__, message=error.message, field=error.field or "")


def error_from_message(message: worker_pb2.ErrorInfo) -> ServeError:
    return rebuild_error(message.kind, message.message, message.field or None)


def rebuild_error(kind: str, message: str, field: str | None) -> ServeError:
    """The error another process named; one it invented becomes an InternalError."""
    known = {
        cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, ServeError)
    }
    return known.get(kind, InternalError)(message, field=field)
