from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AbortHereRequest(_message.Message):
    __slots__ = ("request_id", "resume_token", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    resume_token: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., resume_token: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class AbortHereResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class WatchReservationsRequest(_message.Message):
    __slots__ = ("router_id",)
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    def __init__(self, router_id: _Optional[str] = ...) -> None: ...

class ReservationBatch(_message.Message):
    __slots__ = ("placed", "opened", "ended")
    PLACED_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    placed: _containers.RepeatedCompositeFieldContainer[Reservation]
    opened: _containers.RepeatedScalarFieldContainer[str]
    ended: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, placed: _Optional[_Iterable[_Union[Reservation, _Mapping]]] = ..., opened: _Optional[_Iterable[str]] = ..., ended: _Optional[_Iterable[str]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("request_id", "shares", "block_hashes", "opened")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    shares: _containers.RepeatedCompositeFieldContainer[WorkerShare]
    block_hashes: bytes
    opened: bool
    def __init__(self, request_id: _Optional[str] = ..., shares: _Optional[_Iterable[_Union[WorkerShare, _Mapping]]] = ..., block_hashes: _Optional[bytes] = ..., opened: _Optional[bool] = ...) -> None: ...

class WorkerShare(_message.Message):
    __slots__ = ("worker_id", "tokens", "seconds", "pages", "streams")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    tokens: int
    seconds: float
    pages: int
    streams: int
    def __init__(self, worker_id: _Optional[str] = ..., tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., pages: _Optional[int] = ..., streams: _Optional[int] = ...) -> None: ...
