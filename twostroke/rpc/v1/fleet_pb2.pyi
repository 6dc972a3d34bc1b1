from twostroke.rpc.v1 import adapters_pb2 as _adapters_pb2
from twostroke.rpc.v1 import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("watcher", "address")
    WATCHER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    watcher: str
    address: str
    def __init__(self, watcher: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class FleetView(_message.Message):
    __slots__ = ("version", "workers", "routers", "scaling", "fingerprint", "adapters")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    SCALING_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerEntry]
    routers: _containers.RepeatedCompositeFieldContainer[RouterEntry]
    scaling: Scaling
    fingerprint: str
    adapters: _containers.RepeatedCompositeFieldContainer[_adapters_pb2.NamedAdapter]
    def __init__(self, version: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerEntry, _Mapping]]] = ..., routers: _Optional[_Iterable[_Union[RouterEntry, _Mapping]]] = ..., scaling: _Optional[_Union[Scaling, _Mapping]] = ..., fingerprint: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[_adapters_pb2.NamedAdapter, _Mapping]]] = ...) -> None: ...

class Scaling(_message.Message):
    __slots__ = ("wanted_prefill", "wanted_decode", "automatic", "changes", "switches", "reloading")
    WANTED_PREFILL_FIELD_NUMBER: _ClassVar[int]
    WANTED_DECODE_FIELD_NUMBER: _ClassVar[int]
    AUTOMATIC_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    SWITCHES_FIELD_NUMBER: _ClassVar[int]
    RELOADING_FIELD_NUMBER: _ClassVar[int]
    wanted_prefill: int
    wanted_decode: int
    automatic: bool
    changes: int
    switches: int
    reloading: bool
    def __init__(self, wanted_prefill: _Optional[int] = ..., wanted_decode: _Optional[int] = ..., automatic: _Optional[bool] = ..., changes: _Optional[int] = ..., switches: _Optional[int] = ..., reloading: _Optional[bool] = ...) -> None: ...

class RouterEntry(_message.Message):
    __slots__ = ("router_id", "address")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    address: str
    def __init__(self, router_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class WorkerEntry(_message.Message):
    __slots__ = ("worker_id", "role", "address", "epoch", "state", "node", "metrics_address", "returns")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RETURNS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    address: str
    epoch: str
    state: _control_pb2.WorkerState
    node: str
    metrics_address: str
    returns: bool
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[str] = ..., state: _Optional[_Union[_control_pb2.WorkerState, str]] = ..., node: _Optional[str] = ..., metrics_address: _Optional[str] = ..., returns: _Optional[bool] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "deadline_s", "restart", "force")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    deadline_s: float
    restart: bool
    force: bool
    def __init__(self, worker_id: _Optional[str] = ..., deadline_s: _Optional[float] = ..., restart: _Optional[bool] = ..., force: _Optional[bool] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("open_requests",)
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    open_requests: int
    def __init__(self, open_requests: _Optional[int] = ...) -> None: ...

class AssignRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class AssignRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("router_id", "arrived", "ended", "workers", "block_size")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    arrived: int
    ended: _containers.RepeatedCompositeFieldContainer[EndedAnswer]
    workers: _containers.RepeatedCompositeFieldContainer[_control_pb2.WorkerLoad]
    block_size: int
    def __init__(self, router_id: _Optional[str] = ..., arrived: _Optional[int] = ..., ended: _Optional[_Iterable[_Union[EndedAnswer, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[_control_pb2.WorkerLoad, _Mapping]]] = ..., block_size: _Optional[int] = ...) -> None: ...

class EndedAnswer(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "output_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
