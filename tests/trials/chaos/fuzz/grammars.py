"""What clients ask of the text of an answer, through the process that compiles: no crash, no hang, no bug of ours."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from router.metrics import RouterMetrics
from router.preparation.prepared_texts import PreparedTexts
from router.preparation.preparer import ProcessPreparer
from router.preparation.work_process import WORK_S
from router.text.structured.compile import CompiledGrammar, Refusal
from router.text.structured.fields import structured_output
from router.text.structured.output import StructuredOutput
from router.text.tokenizer import ByteText
from tests.trials.chaos.fuzz.mutate import mutate_json
from tests.trials.chaos.fuzz.target import Target, Try
from twostroke.base.errors import InvalidRequest, RequestTooLarge, ServeError

SLACK_S = 30.0
"""For the start of a process that was ended, on a machine that does other things."""

SCHEMA: dict[str, Any] = {
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"enum": [1, "a", None]}}},
        "code": {"type": "string", "pattern": "^[A-Z]{2,3}-[0-9]+$", "minLength": 3, "maxLength": 12},
    },
    "type": "object",
    "properties": {
        "list": {"type": "array", "items": {"$ref": "#/$defs/code"}, "minItems": 1, "maxItems": 4},
        "pair": {"prefixItems": [{"type": "integer", "minimum": -5, "maximum": 300}], "items": False},
        "tree": {"$ref": "#/$defs/node"},
        "one": {"oneOf": [{"type": "string", "format": "date"}, {"type": "number", "multipleOf": 0.5}]},
        "any": {"anyOf": [{"const": "x"}, {"allOf": [{"type": "boolean"}, {}]}]},
    },
    "patternProperties": {"^x-": {"type": "string"}},
    "additionalProperties": False,
    "required": ["list"],
}


@contextlib.contextmanager
def compiler() -> Iterator[Try]:
    async def outcome(preparer: ProcessPreparer, output: StructuredOutput) -> None:
        began_s = time.monotonic()
        compiled = await preparer.compile(output, "")
        assert time.monotonic() - began_s < WORK_S + SLACK_S, "it took too long"
        if compiled.error is not None:
            assert isinstance(compiled.error, RequestTooLarge | InvalidRequest), compiled.error
            return
        assert isinstance(compiled.value, CompiledGrammar | Refusal)
        if isinstance(compiled.value, Refusal):
            assert "\n" not in compiled.value.error.message

    with asyncio.Runner() as runner:
        loop, preparer = runner.get_loop(), ProcessPreparer(ByteText(), "", PreparedTexts(0, RouterMetrics()))
        running = loop.create_task(preparer.run())

        def attempt(data: bytes) -> None:
            try:
                output = structured_output(json.loads(data))
            except (ServeError, ValueError, AttributeError, RecursionError):
                return
            if output is not None:
                runner.run(outcome(preparer, output))

        try:
            yield attempt
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(running)


def _seeds() -> Sequence[bytes]:
    described = {"name": "n", "schema": SCHEMA, "strict": True}
    lark = 'start: a+ "end"\na: /[a-z]{1,4}/ | "(" start ")" | %json {"type": "integer"}\n'
    gbnf = 'root ::= item{1,3} ("," item)*\nitem ::= [a-z]+ | "\\"" [^"]* "\\""\n'
    wanted: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": described}},
        {"structured_outputs": {"json": SCHEMA["$defs"]["node"], "disable_any_whitespace": True}},
        {"structured_outputs": {"regex": r"(\d{1,3}\.){3}\d{1,3}|[a-f]+(x|y)*z?"}},
        {"structured_outputs": {"choice": ["yes", "no", 'a"b\n', ""]}},
        {"structured_outputs": {"grammar": lark}},
        {"structured_outputs": {"grammar": gbnf}},
    ]
    return [json.dumps(body).encode() for body in wanted]


GRAMMARS = [Target("grammars", _seeds(), mutate_json, compiler, is_live=True)]
