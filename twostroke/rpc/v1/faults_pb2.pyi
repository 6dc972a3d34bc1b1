from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ArmRequest(_message.Message):
    __slots__ = ("fault",)
    FAULT_FIELD_NUMBER: _ClassVar[int]
    fault: str
    def __init__(self, fault: _Optional[str] = ...) -> None: ...

class ArmResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SwitchOffRequest(_message.Message):
    __slots__ = ("guard",)
    GUARD_FIELD_NUMBER: _ClassVar[int]
    guard: str
    def __init__(self, guard: _Optional[str] = ...) -> None: ...

class SwitchOffResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealResponse(_message.Message):
    __slots__ = ("reached",)
    class ReachedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REACHED_FIELD_NUMBER: _ClassVar[int]
    reached: _containers.ScalarMap[str, int]
    def __init__(self, reached: _Optional[_Mapping[str, int]] = ...) -> None: ...
