"""The format that a body asks for: `output_config.format`, and its older name `output_format`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from router.frontend.json_body import wrong_kind
from router.frontend.structured.fields import structured_output
from router.frontend.structured.output import StructuredOutput
from twostroke.client_text import shown
from twostroke.errors import InvalidRequest, UnsupportedFeature


def output_format(body: Mapping[str, Any]) -> StructuredOutput | None:
    """Returns what the text of an answer must match; None: any text. Raises InvalidRequest, naming the field.

    vLLM's `structured_outputs` may stand in a body, too.
    """
    config = body.get("output_config")
    if not isinstance(config, Mapping | None):
        raise wrong_kind("output_config", config, "an object")
    named = {"output_config.format": (config or {}).get("format"), "output_format": body.get("output_format")}
    formats = [_schema(form, name) for name, form in named.items() if form is not None]
    others = structured_output({**body, "response_format": None})
    given = [*formats, *([] if others is None else [others])]
    if len(given) > 1:
        raise InvalidRequest(f"{given[0].field} and {given[1].field} exclude each other", field=given[1].field)
    return given[0] if given else None


def _schema(form: Any, name: str) -> StructuredOutput:
    if not isinstance(form, Mapping):
        raise wrong_kind(name, form, "an object")
    if form.get("type") != "json_schema":
        raise UnsupportedFeature(f"{name}.type must be json_schema, got {shown(str(form.get('type')))}", field=name)
    schema = form.get("schema")
    if not isinstance(schema, Mapping):
        raise wrong_kind(f"{name}.schema", schema, "an object")
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return StructuredOutput("json", text.encode(), f"{name}.schema", is_strict=True)
