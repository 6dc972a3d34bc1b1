"""Messages between the router and the processes that read clients' bytes: msgpack with values, never code.

Objects are of the classes that the messages declare, and a reader checks the types of all fields. So a process that an
attacker controls can send wrong values, but cannot make the router run code.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

import msgpack
from pydantic import BaseModel

from router.requests.client_request import AnswerRequest
from router.requests.work import PreparationOutcome, SegmentQuery, Segments, Work
from router.text.prompts import TokenPrompt
from router.text.structured.compile import CompiledGrammar, Refusal
from router.text.structured.output import StructuredOutput
from twostroke.base.errors import ServeError

Value = TypeVar("Value")
Kind = TypeVar("Kind")

_TUPLE, _ARRAY, _INTEGER, _SET, _ERROR, _ENUM, _OBJECT = range(1, 8)
_TYPECODES = ("I", "f")
_ERROR_FIELDS = (str, int, float, types.NoneType)
_BROKEN = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, ServeError)
"""Exceptions that may be raised for bytes that `packed` has not made."""


class BrokenMessage(ConnectionError):
    """Bytes are not a message of `packed`, so the process that wrote them must not be used again."""


def packed(value: Any) -> bytes:
    """Returns a value as bytes. Raises ValueError for one that is nested too deeply."""
    done = msgpack.packb(value, default=_extended, strict_types=True, unicode_errors="surrogatepass")
    assert isinstance(done, bytes)
    return done


def unpacked(message: bytes, kind: type[Value]) -> Value:
    """Returns the packed value. Raises BrokenMessage if it is no `kind`, or has fields of other types."""
    try:
        value = _plain(message)
    except _BROKEN as error:
        raise BrokenMessage(f"it is not a message: {type(error).__name__}: {error}") from None
    if not isinstance(value, kind):
        raise BrokenMessage(f"it is no {kind.__name__}")
    return value


def _plain(message: bytes) -> Any:
    return msgpack.unpackb(
        message, ext_hook=_restored, strict_map_key=False, unicode_errors="surrogatepass", max_ext_len=len(message)
    )


def _extended(value: Any) -> Any:
    """Returns a value that msgpack can write in place of one that it cannot."""
    match value:
        case enum.Enum():
            return msgpack.ExtType(_ENUM, packed([_name(type(value)), value.value]))
        case array():
            return msgpack.ExtType(_ARRAY, value.typecode.encode() + value.tobytes())
        case int():
            return msgpack.ExtType(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        case str():
            return str(value)
        case frozenset():
            return msgpack.ExtType(_SET, packed(list(value)))
        case Mapping():
            return dict(value)
        case tuple() if type(value) is tuple:
            return msgpack.ExtType(_TUPLE, packed(list(value)))
    return _extended_object(value)


def _extended_object(value: Any) -> Any:
    match value:
        case ServeError():
            return msgpack.ExtType(_ERROR, packed([type(value).__name__, vars(value)]))
        case BaseModel():
            fields = {name: getattr(value, name) for name in type(value).model_fields}
            return msgpack.ExtType(_OBJECT, packed([_name(type(value)), fields, sorted(value.model_fields_set)]))
        case tuple():
            fields = dict(zip(_hints(type(value)), value, strict=True))
            return msgpack.ExtType(_OBJECT, packed([_name(type(value)), fields, []]))
    if dataclasses.is_dataclass(value):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        return msgpack.ExtType(_OBJECT, packed([_name(type(value)), fields, []]))
    raise TypeError(f"{type(value).__name__} is not part of a message")


def _restored(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(_plain(data))
    if code == _ARRAY:
        return _array(data)
    if code == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    if code == _SET:
        return frozenset(_plain(data))
    if code == _ERROR:
        return _error(*_plain(data))
    if code == _ENUM:
        name, value = _plain(data)
        return _enums()[name](value)
    if code == _OBJECT:
        return _object(*_plain(data))
    raise ValueError(f"there is no extension {code}")


def _array(data: bytes) -> array[Any]:
    typecode = data[:1].decode()
    if typecode not in _TYPECODES:
        raise ValueError(f"there are no arrays of {typecode!r}")
    values = array(typecode)
    values.frombytes(data[1:])
    return values


def _error(name: str, fields: dict[str, Any]) -> ServeError:
    kind = _errors()[name]
    if not isinstance(fields["message"], str) or not all(isinstance(each, _ERROR_FIELDS) for each in fields.values()):
        raise ValueError(f"{name} has fields of other kinds")
    error = kind.__new__(kind, fields["message"])
    vars(error).update(fields)
    return error


def _object(name: str, fields: dict[str, Any], given: list[str]) -> Any:
    kind = _classes()[name]
    declared = _declared(kind)
    if fields.keys() != declared.keys():
        raise ValueError(f"{name} has other fields")
    for field, fits in declared.items():
        if not fits(fields[field]):
            raise ValueError(f"{name}.{field} is of another type")
    if not issubclass(kind, BaseModel):
        return kind(**fields)
    made = kind.__new__(kind)  # not validated: its fields are in the form that validation returned
    made.__setstate__(
        {
            "__dict__": fields,
            "__pydantic_fields_set__": set(given) & fields.keys(),
            "__pydantic_extra__": None,
            "__pydantic_private__": None,
        }
    )
    return made


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _errors() -> dict[str, type[ServeError]]:
    return {each.__name__: each for each in _with_subclasses(ServeError)}


@functools.cache
def _classes() -> dict[str, type]:
    """Returns classes by name: those of all messages, and those that their fields are declared to hold."""
    answers = _with_subclasses(AnswerRequest)
    waiting: list[Any] = [Work, PreparationOutcome, SegmentQuery, Segments, CompiledGrammar, Refusal]
    waiting += [StructuredOutput, TokenPrompt, *answers]
    found: dict[str, type] = {}
    while waiting:
        hint = waiting.pop()
        waiting += get_args(hint)
        if not isinstance(hint, type) or _name(hint) in found:
            continue
        if issubclass(hint, enum.Enum):
            found[_name(hint)] = hint
        elif issubclass(hint, BaseModel) or dataclasses.is_dataclass(hint) or _is_named_tuple(hint):
            found[_name(hint)] = hint
            waiting += _hints(found[_name(hint)]).values()
    return found


@functools.cache
def _enums() -> dict[str, type[enum.Enum]]:
    return {name: kind for name, kind in _classes().items() if issubclass(kind, enum.Enum)}


def _with_subclasses(kind: type[Kind]) -> Iterator[type[Kind]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _with_subclasses(each)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and kind is not tuple


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    if issubclass(kind, BaseModel):
        return {name: hints[name] for name in kind.model_fields}
    if dataclasses.is_dataclass(kind):
        return {each.name: hints[each.name] for each in dataclasses.fields(kind)}
    return hints


Fits = Callable[[Any], bool]


@functools.cache
def _declared(kind: type) -> dict[str, Fits]:
    return {name: _fits(hint) for name, hint in _hints(kind).items()}


_NUMBERS: Final[Mapping[Any, tuple[type, ...]]] = {int: (int,), float: (int, float)}


def _fits(hint: Any) -> Fits:
    """Returns a function that checks whether a value is of a declared type."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return lambda value: True
    if hint in _NUMBERS:
        return lambda value: isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    if origin in (Union, types.UnionType):
        each_fits = [_fits(each) for each in inner]
        return lambda value: any(fits(value) for fits in each_fits)
    if origin is Literal:
        return lambda value: value in inner
    if origin is tuple and inner[-1:] != (...,):
        of_places = [_fits(each) for each in inner]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(of_places)
            and all(fits(each) for fits, each in zip(of_places, value, strict=True))
        )
    if is_typeddict(hint):
        return lambda value: isinstance(value, dict)
    if origin is not None and issubclass(origin, Mapping):
        key_fits, value_fits = map(_fits, inner)
        return lambda value: (
            isinstance(value, dict) and all(key_fits(key) and value_fits(each) for key, each in value.items())
        )
    if origin is not None:
        return _all_fit(list if origin is Sequence else origin, _fits(inner[0]))
    if not isinstance(hint, type):
        raise TypeError(f"{hint} is not a type that a message can have")
    return lambda value: isinstance(value, hint)


def _all_fit(kind: Any, fits: Fits) -> Fits:
    """Returns a function that checks all items of a sequence.

    The sequence may also be a tuple, or an array, whose items need no check.
    """
    kinds = (list, tuple) if kind is list else kind
    return lambda value: isinstance(value, array) or (isinstance(value, kinds) and all(map(fits, value)))
