from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_STARTING: _ClassVar[WorkerState]
    WORKER_STATE_SERVING: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_DEAD: _ClassVar[WorkerState]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_STARTING: WorkerState
WORKER_STATE_SERVING: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_DEAD: WorkerState
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("server_id", "role", "epoch", "fingerprint", "version", "state", "metrics_address", "http_address", "grpc_address", "clock_ns", "machine", "kernels", "memory", "kv_form")
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HTTP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    KV_FORM_FIELD_NUMBER: _ClassVar[int]
    server_id: str
    role: str
    epoch: str
    fingerprint: str
    version: str
    state: WorkerState
    metrics_address: str
    http_address: str
    grpc_address: str
    clock_ns: int
    machine: str
    kernels: KernelsInfo
    memory: _containers.RepeatedCompositeFieldContainer[MemoryUse]
    kv_form: str
    def __init__(self, server_id: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[str] = ..., fingerprint: _Optional[str] = ..., version: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., metrics_address: _Optional[str] = ..., http_address: _Optional[str] = ..., grpc_address: _Optional[str] = ..., clock_ns: _Optional[int] = ..., machine: _Optional[str] = ..., kernels: _Optional[_Union[KernelsInfo, _Mapping]] = ..., memory: _Optional[_Iterable[_Union[MemoryUse, _Mapping]]] = ..., kv_form: _Optional[str] = ...) -> None: ...

class MemoryUse(_message.Message):
    __slots__ = ("part", "billed_bytes", "measured_bytes")
    PART_FIELD_NUMBER: _ClassVar[int]
    BILLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEASURED_BYTES_FIELD_NUMBER: _ClassVar[int]
    part: str
    billed_bytes: int
    measured_bytes: int
    def __init__(self, part: _Optional[str] = ..., billed_bytes: _Optional[int] = ..., measured_bytes: _Optional[int] = ...) -> None: ...

class KernelsInfo(_message.Message):
    __slots__ = ("variant", "reason", "threads", "ranks")
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    variant: str
    reason: str
    threads: int
    ranks: int
    def __init__(self, variant: _Optional[str] = ..., reason: _Optional[str] = ..., threads: _Optional[int] = ..., ranks: _Optional[int] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model", "max_model_len", "vocab_size", "eos_token_ids", "dtype", "block_size", "page_bytes", "pool_pages", "kv_format", "kv_converted_from", "tail_blocks", "further_page_bytes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_PAGES_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KV_CONVERTED_FROM_FIELD_NUMBER: _ClassVar[int]
    TAIL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FURTHER_PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    block_size: int
    page_bytes: int
    pool_pages: int
    kv_format: str
    kv_converted_from: str
    tail_blocks: int
    further_page_bytes: int
    def __init__(self, model: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., page_bytes: _Optional[int] = ..., pool_pages: _Optional[int] = ..., kv_format: _Optional[str] = ..., kv_converted_from: _Optional[str] = ..., tail_blocks: _Optional[int] = ..., further_page_bytes: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("worker_id", "load", "server")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    load: Load
    server: ServerInfo
    def __init__(self, worker_id: _Optional[str] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., server: _Optional[_Union[ServerInfo, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "queued_tokens", "pages_total", "pages_free", "pages_cached", "pages_arriving", "pages_active", "pages_quarantined", "seconds_per_token", "seconds_per_step", "state", "queued_s", "prefill_busy_s", "costs", "links", "tiers", "slots", "max_waiting", "pages_pinned", "queried_tokens", "hit_tokens", "conversion_page_s", "weights", "weights_load_s", "further", "stream_step")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PAGES_ARRIVING_FIELD_NUMBER: _ClassVar[int]
    PAGES_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    PAGES_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_BUSY_S_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    PAGES_PINNED_FIELD_NUMBER: _ClassVar[int]
    QUERIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONVERSION_PAGE_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    STREAM_STEP_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    queued_tokens: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_arriving: int
    pages_active: int
    pages_quarantined: int
    seconds_per_token: float
    seconds_per_step: float
    state: WorkerState
    queued_s: float
    prefill_busy_s: float
    costs: StepCosts
    links: _containers.RepeatedCompositeFieldContainer[LinkRate]
    tiers: _containers.RepeatedCompositeFieldContainer[TierRate]
    slots: int
    max_waiting: int
    pages_pinned: int
    queried_tokens: int
    hit_tokens: int
    conversion_page_s: float
    weights: _containers.RepeatedScalarFieldContainer[bytes]
    weights_load_s: float
    further: PageCounts
    stream_step: StreamStep
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., pages_arriving: _Optional[int] = ..., pages_active: _Optional[int] = ..., pages_quarantined: _Optional[int] = ..., seconds_per_token: _Optional[float] = ..., seconds_per_step: _Optional[float] = ..., state: _Optional[_Union[WorkerState, str]] = ..., queued_s: _Optional[float] = ..., prefill_busy_s: _Optional[float] = ..., costs: _Optional[_Union[StepCosts, _Mapping]] = ..., links: _Optional[_Iterable[_Union[LinkRate, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[TierRate, _Mapping]]] = ..., slots: _Optional[int] = ..., max_waiting: _Optional[int] = ..., pages_pinned: _Optional[int] = ..., queried_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., conversion_page_s: _Optional[float] = ..., weights: _Optional[_Iterable[bytes]] = ..., weights_load_s: _Optional[float] = ..., further: _Optional[_Union[PageCounts, _Mapping]] = ..., stream_step: _Optional[_Union[StreamStep, _Mapping]] = ...) -> None: ...

class StreamStep(_message.Message):
    __slots__ = ("rows", "tokens", "before_s")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    rows: float
    tokens: float
    before_s: float
    def __init__(self, rows: _Optional[float] = ..., tokens: _Optional[float] = ..., before_s: _Optional[float] = ...) -> None: ...

class PageCounts(_message.Message):
    __slots__ = ("total", "free", "cached", "arriving", "active", "quarantined", "pinned")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    arriving: int
    active: int
    quarantined: int
    pinned: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., arriving: _Optional[int] = ..., active: _Optional[int] = ..., quarantined: _Optional[int] = ..., pinned: _Optional[int] = ...) -> None: ...

class StepCosts(_message.Message):
    __slots__ = ("step_s", "stream_s", "context_token_s", "prompt_step_s", "prompt_token_s", "prompt_pair_s", "step_tokens", "step_target_s")
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    STREAM_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PAIR_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    step_s: float
    stream_s: float
    context_token_s: float
    prompt_step_s: float
    prompt_token_s: float
    prompt_pair_s: float
    step_tokens: int
    step_target_s: float
    def __init__(self, step_s: _Optional[float] = ..., stream_s: _Optional[float] = ..., context_token_s: _Optional[float] = ..., prompt_step_s: _Optional[float] = ..., prompt_token_s: _Optional[float] = ..., prompt_pair_s: _Optional[float] = ..., step_tokens: _Optional[int] = ..., step_target_s: _Optional[float] = ...) -> None: ...

class LinkRate(_message.Message):
    __slots__ = ("worker_id", "latency_s", "bytes_per_s")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    latency_s: float
    bytes_per_s: float
    def __init__(self, worker_id: _Optional[str] = ..., latency_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class TierRate(_message.Message):
    __slots__ = ("tier", "page_s", "blocks", "used_bytes", "capacity_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    PAGE_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    page_s: float
    blocks: int
    used_bytes: int
    capacity_bytes: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., page_s: _Optional[float] = ..., blocks: _Optional[int] = ..., used_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ...) -> None: ...

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ("epoch", "start_sequence", "worker_id")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    start_sequence: int
    worker_id: str
    def __init__(self, epoch: _Optional[str] = ..., start_sequence: _Optional[int] = ..., worker_id: _Optional[str] = ...) -> None: ...

class KvEventBatch(_message.Message):
    __slots__ = ("worker_id", "epoch", "sequence", "snapshot", "stored", "removed", "cleared", "block_count", "digest", "load", "further", "published_s", "part", "more")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    FURTHER_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_S_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    sequence: int
    snapshot: bool
    stored: bytes
    removed: bytes
    cleared: bool
    block_count: int
    digest: bytes
    load: Load
    further: _containers.RepeatedCompositeFieldContainer[TierChange]
    published_s: float
    part: int
    more: bool
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., cleared: _Optional[bool] = ..., block_count: _Optional[int] = ..., digest: _Optional[bytes] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., further: _Optional[_Iterable[_Union[TierChange, _Mapping]]] = ..., published_s: _Optional[float] = ..., part: _Optional[int] = ..., more: _Optional[bool] = ...) -> None: ...

class TierChange(_message.Message):
    __slots__ = ("tier", "stored", "removed", "group")
    TIER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    stored: bytes
    removed: bytes
    group: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., stored: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., group: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_s", "successors")
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SUCCESSORS_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    successors: _containers.RepeatedCompositeFieldContainer[Successor]
    def __init__(self, deadline_s: _Optional[float] = ..., successors: _Optional[_Iterable[_Union[Successor, _Mapping]]] = ...) -> None: ...

class Successor(_message.Message):
    __slots__ = ("worker_id", "address", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    epoch: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("open_requests",)
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    open_requests: int
    def __init__(self, open_requests: _Optional[int] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("stream", "spans", "forgotten", "silent")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    stream: str
    spans: _containers.RepeatedCompositeFieldContainer[TraceSpan]
    forgotten: bool
    silent: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stream: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[TraceSpan, _Mapping]]] = ..., forgotten: _Optional[bool] = ..., silent: _Optional[_Iterable[str]] = ...) -> None: ...

class TraceSpan(_message.Message):
    __slots__ = ("name", "process", "trace_id", "span_id", "parent_id", "start_s", "end_s", "attributes", "events", "error")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ID_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    name: str
    process: str
    trace_id: str
    span_id: int
    parent_id: int
    start_s: float
    end_s: float
    attributes: _containers.RepeatedCompositeFieldContainer[TraceAttribute]
    events: _containers.RepeatedCompositeFieldContainer[TraceEvent]
    error: str
    def __init__(self, name: _Optional[str] = ..., process: _Optional[str] = ..., trace_id: _Optional[str] = ..., span_id: _Optional[int] = ..., parent_id: _Optional[int] = ..., start_s: _Optional[float] = ..., end_s: _Optional[float] = ..., attributes: _Optional[_Iterable[_Union[TraceAttribute, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[TraceEvent, _Mapping]]] = ..., error: _Optional[str] = ...) -> None: ...

class TraceEvent(_message.Message):
    __slots__ = ("name", "at_s", "attributes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    at_s: float
    attributes: _containers.RepeatedCompositeFieldContainer[TraceAttribute]
    def __init__(self, name: _Optional[str] = ..., at_s: _Optional[float] = ..., attributes: _Optional[_Iterable[_Union[TraceAttribute, _Mapping]]] = ...) -> None: ...

class TraceAttribute(_message.Message):
    __slots__ = ("name", "text", "whole", "number", "flag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    whole: int
    number: float
    flag: bool
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., whole: _Optional[int] = ..., number: _Optional[float] = ..., flag: _Optional[bool] = ...) -> None: ...

class ProfileRequest(_message.Message):
    __slots__ = ("seconds", "alone")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    alone: bool
    def __init__(self, seconds: _Optional[float] = ..., alone: _Optional[bool] = ...) -> None: ...

class ProfilePart(_message.Message):
    __slots__ = ("process", "about", "slices", "spans", "failure")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    process: str
    about: ProfiledProcess
    slices: _containers.RepeatedCompositeFieldContainer[ProfileSlice]
    spans: _containers.RepeatedCompositeFieldContainer[TraceSpan]
    failure: str
    def __init__(self, process: _Optional[str] = ..., about: _Optional[_Union[ProfiledProcess, _Mapping]] = ..., slices: _Optional[_Iterable[_Union[ProfileSlice, _Mapping]]] = ..., spans: _Optional[_Iterable[_Union[TraceSpan, _Mapping]]] = ..., failure: _Optional[str] = ...) -> None: ...

class ProfiledProcess(_message.Message):
    __slots__ = ("role", "machine", "pid", "clock_offset_ns", "clock_error_ns", "wall_offset_ns", "begin_ns", "end_ns", "dropped", "limits")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_NS_FIELD_NUMBER: _ClassVar[int]
    WALL_OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    role: str
    machine: str
    pid: int
    clock_offset_ns: int
    clock_error_ns: int
    wall_offset_ns: int
    begin_ns: int
    end_ns: int
    dropped: int
    limits: MachineLimits
    def __init__(self, role: _Optional[str] = ..., machine: _Optional[str] = ..., pid: _Optional[int] = ..., clock_offset_ns: _Optional[int] = ..., clock_error_ns: _Optional[int] = ..., wall_offset_ns: _Optional[int] = ..., begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., dropped: _Optional[int] = ..., limits: _Optional[_Union[MachineLimits, _Mapping]] = ...) -> None: ...

class MachineLimits(_message.Message):
    __slots__ = ("threads", "read_bytes_per_s", "operations_per_s")
    THREADS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_PER_S_FIELD_NUMBER: _ClassVar[int]
    threads: int
    read_bytes_per_s: float
    operations_per_s: float
    def __init__(self, threads: _Optional[int] = ..., read_bytes_per_s: _Optional[float] = ..., operations_per_s: _Optional[float] = ...) -> None: ...

class ProfileSlice(_message.Message):
    __slots__ = ("track", "name", "start_ns", "end_ns", "facts", "kernels")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TRACK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    track: str
    name: str
    start_ns: int
    end_ns: int
    facts: _containers.ScalarMap[str, float]
    kernels: bytes
    def __init__(self, track: _Optional[str] = ..., name: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., facts: _Optional[_Mapping[str, float]] = ..., kernels: _Optional[bytes] = ...) -> None: ...

class ForgetCachedRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForgetCachedResponse(_message.Message):
    __slots__ = ("blocks", "pinned")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    pinned: int
    def __init__(self, blocks: _Optional[int] = ..., pinned: _Optional[int] = ...) -> None: ...
