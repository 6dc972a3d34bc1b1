from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchRequest(_message.Message):
    __slots__ = ("fingerprint", "worker_epoch", "source", "block_hashes", "root", "within_s")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    worker_epoch: str
    source: PageSource
    block_hashes: bytes
    root: bytes
    within_s: float
    def __init__(self, fingerprint: _Optional[str] = ..., worker_epoch: _Optional[str] = ..., source: _Optional[_Union[PageSource, _Mapping]] = ..., block_hashes: _Optional[bytes] = ..., root: _Optional[bytes] = ..., within_s: _Optional[float] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("request_id", "requester", "fingerprint", "source_epoch", "tokens", "block_hashes", "wanted", "peer", "peer_blocks", "cached_only", "traceparent", "kv_form", "peer_load_s", "conversion", "weights")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PEER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_ONLY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    KV_FORM_FIELD_NUMBER: _ClassVar[int]
    PEER_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    CONVERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    requester: str
    fingerprint: str
    source_epoch: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: bytes
    wanted: _containers.RepeatedCompositeFieldContainer[WantedPages]
    peer: PageSource
    peer_blocks: int
    cached_only: bool
    traceparent: str
    kv_form: str
    peer_load_s: float
    conversion: PullerConversion
    weights: Weights
    def __init__(self, request_id: _Optional[str] = ..., requester: _Optional[str] = ..., fingerprint: _Optional[str] = ..., source_epoch: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[bytes] = ..., wanted: _Optional[_Iterable[_Union[WantedPages, _Mapping]]] = ..., peer: _Optional[_Union[PageSource, _Mapping]] = ..., peer_blocks: _Optional[int] = ..., cached_only: _Optional[bool] = ..., traceparent: _Optional[str] = ..., kv_form: _Optional[str] = ..., peer_load_s: _Optional[float] = ..., conversion: _Optional[_Union[PullerConversion, _Mapping]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ...) -> None: ...

class WantedPages(_message.Message):
    __slots__ = ("group", "blocks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    group: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class PullerConversion(_message.Message):
    __slots__ = ("page_s", "wait_s", "bytes_per_s")
    PAGE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    page_s: float
    wait_s: float
    bytes_per_s: float
    def __init__(self, page_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("accepted", "ready", "alive")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    accepted: PullAccepted
    ready: PagesReady
    alive: PullAlive
    def __init__(self, accepted: _Optional[_Union[PullAccepted, _Mapping]] = ..., ready: _Optional[_Union[PagesReady, _Mapping]] = ..., alive: _Optional[_Union[PullAlive, _Mapping]] = ...) -> None: ...

class PullAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PullAccepted(_message.Message):
    __slots__ = ("epoch", "endpoints", "kv_form")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    KV_FORM_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    endpoints: _containers.RepeatedScalarFieldContainer[bytes]
    kv_form: str
    def __init__(self, epoch: _Optional[str] = ..., endpoints: _Optional[_Iterable[bytes]] = ..., kv_form: _Optional[str] = ...) -> None: ...

class PagesReady(_message.Message):
    __slots__ = ("blocks", "computed", "also_computed", "pages", "generations", "digests", "groups")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    ALSO_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    computed: int
    also_computed: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    digests: bytes
    groups: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks: _Optional[_Iterable[int]] = ..., computed: _Optional[int] = ..., also_computed: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., digests: _Optional[bytes] = ..., groups: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("seed", "max_tokens", "choice", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias_tokens", "bias_values", "logprobs", "min_tokens", "ignore_eos", "stop_token_ids", "prompt_logprobs", "allowed_tokens", "logprob_token_ids", "grammar")
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    seed: int
    max_tokens: int
    choice: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    bias_values: _containers.RepeatedScalarFieldContainer[float]
    logprobs: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    allowed_tokens: bytes
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    def __init__(self, seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., choice: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., bias_values: _Optional[_Iterable[float]] = ..., logprobs: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., allowed_tokens: _Optional[bytes] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ...) -> None: ...

class PageSource(_message.Message):
    __slots__ = ("worker_id", "address", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    epoch: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("digest", "path")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    path: str
    def __init__(self, digest: _Optional[bytes] = ..., path: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("prompt", "sampling", "salt", "public_blocks", "weights", "deadline_s", "speculation", "hints", "hint_tenant")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    HINT_TENANT_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    salt: bytes
    public_blocks: int
    weights: Weights
    deadline_s: float
    speculation: str
    hints: _containers.RepeatedCompositeFieldContainer[CacheHint]
    hint_tenant: str
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., salt: _Optional[bytes] = ..., public_blocks: _Optional[int] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., deadline_s: _Optional[float] = ..., speculation: _Optional[str] = ..., hints: _Optional[_Iterable[_Union[CacheHint, _Mapping]]] = ..., hint_tenant: _Optional[str] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("request", "request_id", "attempt", "router_id", "fingerprint", "worker_epoch", "emitted", "block_hashes", "traceparent", "source", "source_forecast", "peer", "peer_blocks", "peer_load_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FORECAST_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    PEER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PEER_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    request: Request
    request_id: str
    attempt: int
    router_id: str
    fingerprint: str
    worker_epoch: str
    emitted: _containers.RepeatedCompositeFieldContainer[Token]
    block_hashes: bytes
    traceparent: str
    source: PageSource
    source_forecast: SourceForecast
    peer: PageSource
    peer_blocks: int
    peer_load_s: float
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., router_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., worker_epoch: _Optional[str] = ..., emitted: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., block_hashes: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., source: _Optional[_Union[PageSource, _Mapping]] = ..., source_forecast: _Optional[_Union[SourceForecast, _Mapping]] = ..., peer: _Optional[_Union[PageSource, _Mapping]] = ..., peer_blocks: _Optional[int] = ..., peer_load_s: _Optional[float] = ...) -> None: ...

class SourceForecast(_message.Message):
    __slots__ = ("cached_blocks", "fetch_s", "wait_s", "compute_s")
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    cached_blocks: int
    fetch_s: float
    wait_s: float
    compute_s: float
    def __init__(self, cached_blocks: _Optional[int] = ..., fetch_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., compute_s: _Optional[float] = ...) -> None: ...

class CacheHint(_message.Message):
    __slots__ = ("blocks", "seconds")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    seconds: float
    def __init__(self, blocks: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokensRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class TokenBatch(_message.Message):
    __slots__ = ("entries", "numbers", "positions", "tokens")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[TokenEntry]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, entries: _Optional[_Iterable[_Union[TokenEntry, _Mapping]]] = ..., numbers: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenEntry(_message.Message):
    __slots__ = ("request_id", "attempt", "position", "tokens", "finish_reason", "error", "cached_tokens", "local_tokens", "lifetime", "number", "prompt_logprobs", "drafts")
    class LifetimeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class DraftsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: DraftCounts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[DraftCounts, _Mapping]] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LIFETIME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    position: int
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    finish_reason: str
    error: ErrorInfo
    cached_tokens: int
    local_tokens: int
    lifetime: _containers.ScalarMap[str, float]
    number: int
    prompt_logprobs: PromptLogprobs
    drafts: _containers.MessageMap[str, DraftCounts]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., position: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., error: _Optional[_Union[ErrorInfo, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., local_tokens: _Optional[int] = ..., lifetime: _Optional[_Mapping[str, float]] = ..., number: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., drafts: _Optional[_Mapping[str, DraftCounts]] = ...) -> None: ...

class DraftCounts(_message.Message):
    __slots__ = ("drafted", "kept")
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    drafted: int
    kept: int
    def __init__(self, drafted: _Optional[int] = ..., kept: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("logprobs", "ordinals", "top_ids", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ORDINALS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ordinals: _containers.RepeatedScalarFieldContainer[int]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., ordinals: _Optional[_Iterable[int]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "logprob", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class ErrorInfo(_message.Message):
    __slots__ = ("kind", "message", "field")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    field: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "router_id", "from_position", "new_attempt", "deadline_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_POSITION_FIELD_NUMBER: _ClassVar[int]
    NEW_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    router_id: str
    from_position: int
    new_attempt: int
    deadline_s: float
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., router_id: _Optional[str] = ..., from_position: _Optional[int] = ..., new_attempt: _Optional[int] = ..., deadline_s: _Optional[float] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FindRequest(_message.Message):
    __slots__ = ("stream",)
    STREAM_FIELD_NUMBER: _ClassVar[int]
    stream: str
    def __init__(self, stream: _Optional[str] = ...) -> None: ...

class FindResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestSnapshot]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestSnapshot, _Mapping]]] = ...) -> None: ...

class RequestSnapshot(_message.Message):
    __slots__ = ("request_id", "attempt", "request", "tokens", "finish_reason", "cached_tokens", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    request: Request
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    finish_reason: str
    cached_tokens: int
    prompt_logprobs: PromptLogprobs
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...
