from twostroke.rpc.v1 import inference_pb2 as _inference_pb2
from twostroke.rpc.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PinState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PIN_STATE_UNSPECIFIED: _ClassVar[PinState]
    PIN_STATE_READY: _ClassVar[PinState]
    PIN_STATE_COMPUTING: _ClassVar[PinState]
    PIN_STATE_FAILED: _ClassVar[PinState]
    PIN_STATE_AWAY: _ClassVar[PinState]
PIN_STATE_UNSPECIFIED: PinState
PIN_STATE_READY: PinState
PIN_STATE_COMPUTING: PinState
PIN_STATE_FAILED: PinState
PIN_STATE_AWAY: PinState

class Pin(_message.Message):
    __slots__ = ("pin_id", "owner", "tenant", "tokens", "block_hashes", "expires_s", "workers", "max_bytes", "text", "fingerprint", "weights")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    owner: str
    tenant: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: bytes
    expires_s: float
    workers: _containers.RepeatedScalarFieldContainer[str]
    max_bytes: int
    text: str
    fingerprint: str
    weights: _worker_pb2.Weights
    def __init__(self, pin_id: _Optional[str] = ..., owner: _Optional[str] = ..., tenant: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[bytes] = ..., expires_s: _Optional[float] = ..., workers: _Optional[_Iterable[str]] = ..., max_bytes: _Optional[int] = ..., text: _Optional[str] = ..., fingerprint: _Optional[str] = ..., weights: _Optional[_Union[_worker_pb2.Weights, _Mapping]] = ...) -> None: ...

class PutPinRequest(_message.Message):
    __slots__ = ("pin", "source", "per_role")
    PIN_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PER_ROLE_FIELD_NUMBER: _ClassVar[int]
    pin: Pin
    source: _worker_pb2.PageSource
    per_role: int
    def __init__(self, pin: _Optional[_Union[Pin, _Mapping]] = ..., source: _Optional[_Union[_worker_pb2.PageSource, _Mapping]] = ..., per_role: _Optional[int] = ...) -> None: ...

class PutPinResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[HeldPin]
    def __init__(self, held: _Optional[_Iterable[_Union[HeldPin, _Mapping]]] = ...) -> None: ...

class HeldPin(_message.Message):
    __slots__ = ("worker_id", "pin_id", "owner", "tenant", "text", "state", "blocks", "ready_blocks", "bytes", "hits", "saved_s", "expires_s", "problem", "is_hint")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_S_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    IS_HINT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pin_id: str
    owner: str
    tenant: str
    text: str
    state: PinState
    blocks: int
    ready_blocks: int
    bytes: int
    hits: int
    saved_s: float
    expires_s: float
    problem: str
    is_hint: bool
    def __init__(self, worker_id: _Optional[str] = ..., pin_id: _Optional[str] = ..., owner: _Optional[str] = ..., tenant: _Optional[str] = ..., text: _Optional[str] = ..., state: _Optional[_Union[PinState, str]] = ..., blocks: _Optional[int] = ..., ready_blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., hits: _Optional[int] = ..., saved_s: _Optional[float] = ..., expires_s: _Optional[float] = ..., problem: _Optional[str] = ..., is_hint: _Optional[bool] = ...) -> None: ...

class RemovePinRequest(_message.Message):
    __slots__ = ("pin_id", "owner")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    owner: str
    def __init__(self, pin_id: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class RemovePinResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ("hints",)
    HINTS_FIELD_NUMBER: _ClassVar[int]
    hints: bool
    def __init__(self, hints: _Optional[bool] = ...) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("held", "uses")
    HELD_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedCompositeFieldContainer[HeldPin]
    uses: _containers.RepeatedCompositeFieldContainer[PinUse]
    def __init__(self, held: _Optional[_Iterable[_Union[HeldPin, _Mapping]]] = ..., uses: _Optional[_Iterable[_Union[PinUse, _Mapping]]] = ...) -> None: ...

class PinUse(_message.Message):
    __slots__ = ("worker_id", "pages_total", "pages_pinned", "most_pages", "page_bytes", "hints")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_PINNED_FIELD_NUMBER: _ClassVar[int]
    MOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    pages_total: int
    pages_pinned: int
    most_pages: int
    page_bytes: int
    hints: int
    def __init__(self, worker_id: _Optional[str] = ..., pages_total: _Optional[int] = ..., pages_pinned: _Optional[int] = ..., most_pages: _Optional[int] = ..., page_bytes: _Optional[int] = ..., hints: _Optional[int] = ...) -> None: ...

class AddPinRequest(_message.Message):
    __slots__ = ("text", "chat", "token_ids", "owner", "tenant", "cache_salt", "ttl_s", "max_bytes", "workers", "per_role", "model")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PER_ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat: _inference_pb2.Chat
    token_ids: _inference_pb2.TokenIds
    owner: str
    tenant: str
    cache_salt: str
    ttl_s: float
    max_bytes: int
    workers: _containers.RepeatedScalarFieldContainer[str]
    per_role: int
    model: str
    def __init__(self, text: _Optional[str] = ..., chat: _Optional[_Union[_inference_pb2.Chat, _Mapping]] = ..., token_ids: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., owner: _Optional[str] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[str] = ..., ttl_s: _Optional[float] = ..., max_bytes: _Optional[int] = ..., workers: _Optional[_Iterable[str]] = ..., per_role: _Optional[int] = ..., model: _Optional[str] = ...) -> None: ...

class AddPinResponse(_message.Message):
    __slots__ = ("pin_id", "tokens", "pinned_tokens", "public_tokens", "held")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PINNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    tokens: int
    pinned_tokens: int
    public_tokens: int
    held: _containers.RepeatedCompositeFieldContainer[HeldPin]
    def __init__(self, pin_id: _Optional[str] = ..., tokens: _Optional[int] = ..., pinned_tokens: _Optional[int] = ..., public_tokens: _Optional[int] = ..., held: _Optional[_Iterable[_Union[HeldPin, _Mapping]]] = ...) -> None: ...
