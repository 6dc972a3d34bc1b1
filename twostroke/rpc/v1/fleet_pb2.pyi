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
    __slots__ = ("version", "members", "routers")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    routers: _containers.RepeatedCompositeFieldContainer[RouterMember]
    def __init__(self, version: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., routers: _Optional[_Iterable[_Union[RouterMember, _Mapping]]] = ...) -> None: ...

class RouterMember(_message.Message):
    __slots__ = ("router_id", "address")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    address: str
    def __init__(self, router_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Member(_message.Message):
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
    __slots__ = ("worker_id", "deadline_s", "restart")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    deadline_s: float
    restart: bool
    def __init__(self, worker_id: _Optional[str] = ..., deadline_s: _Optional[float] = ..., restart: _Optional[bool] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("open_requests",)
    OPEN_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    open_requests: int
    def __init__(self, open_requests: _Optional[int] = ...) -> None: ...
