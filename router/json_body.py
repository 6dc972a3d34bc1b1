"""JSON bodies as pydantic models. A body that is not valid raises InvalidRequest, which names the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from twostroke.base.errors import InvalidRequest

MOST_BITS = 1024
"""Most bits of a number in a request: as in floats. Python refuses to print integers of thousands of digits."""

BYTES_FIELD = "bytes_behind_the_json"
"""Field for the bytes after the JSON, in bodies that may have some. A field of this name in the client's JSON is
ignored."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of one half of a surrogate pair. Valid UTF-8 cannot hold one unescaped."""


def parse_json(body: bytes) -> dict[str, Any]:
    """Returns the JSON object that `body` holds."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from error
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if _SURROGATE.search(text):
            _check_strings(value, "")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {_kind(value)}")
    return value


def parse_json_text(text: str, field: str) -> Any:
    """Parses a field's text as JSON. Raises InvalidRequest that names the field."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
        if _SURROGATE.search(text):
            _check_strings(value, field)
    except RecursionError as error:
        raise InvalidRequest(f"{field} is nested too deeply", field=field) from error
    except ValueError as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}", field=field) from error
    return value


def _finite(number: str) -> float:
    """Returns the number. Raises ValueError for infinity and NaN, which JSON does not have."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:40]} is not a finite number")
    return value


def checked_utf8(value: str, field: str) -> str:
    """Returns `value`. Raises InvalidRequest that names the field for half a surrogate pair: no tokenizer takes it."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} is not valid Unicode text: {error}", field=field) from error
    return value


def _check_strings(value: Any, name: str) -> None:
    """Raises InvalidRequest that names the first string with half a surrogate pair in it."""
    if isinstance(value, str):
        checked_utf8(value, name)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_strings(entry, f"{name}[{index}]")
    elif isinstance(value, dict):
        for key, entry in value.items():
            checked_utf8(key, name or "a name in the body")
            _check_strings(entry, f"{name}.{key}" if name else key)


class Body(BaseModel):
    """One JSON object. `null` counts as "not given"; unknown fields are ignored, as OpenAI's servers and vLLM do.

    The description of a field completes "must be ..." in errors. Fields with a plain type need none.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Returns the body. Raises InvalidRequest that names the field."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _in_words(cls, error.errors(include_url=False)[0]) from None


_WANTED = {
    "int_type": "an integer",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "valid Unicode text",
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
}
"""What a field must be, by the type of pydantic's error."""


def _in_words(kind: type[Body], error: ErrorDetails) -> InvalidRequest:
    parts = error["loc"]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    field = kind.model_fields.get(str(parts[0])) if len(parts) == 1 else None
    wanted = (field and field.description) or _WANTED.get(error["type"])
    if error["type"] == "missing":
        return InvalidRequest(f"{name} must be {wanted}" if wanted else f"{name} is needed", field=name)
    what = f"must be {wanted}, got {_kind(error['input'])}" if wanted else error["msg"]
    return InvalidRequest(f"{name} {what}", field=name)


def wrong_kind(name: str | None, value: Any, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {wanted}, got {_kind(value)}", field=name)


def _whole(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise wrong_kind(info.field_name, value, f"a number of at most {MOST_BITS} bits")
    return value


def _token_ids(value: Any, info: ValidationInfo) -> Sequence[int]:
    if is_token_list(value):
        assert isinstance(value, list)
        return value
    raise wrong_kind(info.field_name, value, "a list of token ids")


def _strings(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if isinstance(values, list) and all(isinstance(entry, str) for entry in values):
        return tuple(values)
    raise wrong_kind(info.field_name, value, "a string or a list of strings")


Integer = Annotated[int, BeforeValidator(_whole)]
"""An integer, which JSON may write as 3.0."""
Number = Annotated[float, Field(allow_inf_nan=False)]
TokenIds = Annotated[Sequence[int], PlainValidator(_token_ids, json_schema_input_type=list[int])]
Strings = Annotated[tuple[str, ...], PlainValidator(_strings, json_schema_input_type=str | list[str])]
"""A string or a list of strings."""


def as_number(value: Any, name: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise InvalidRequest(f"{name} must be a finite number, got {_kind(value)}", field=name)


def is_token_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and set(map(type, value)) <= {int}  # fast for millions, too
        and all(bound.bit_length() <= MOST_BITS for bound in (value and (min(value), max(value))))
    )


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
