from __future__ import annotations

import cProfile

import pytest

from router.text.output.framing import MAX_HELD
from router.text.output.output_formats import TOOL_FORMATS, ToolFormat
from tests.conformance.make_tool_outputs import TOOLS

PIECES = (
    *("<", "[", "{", '"', "\n", "a ", "<tool_call>", "<tool_call>{", "[TOOL_CALLS][{", "[ping(", "<|start|>"),
    '{"name": "ping", "arguments": {',
    '<tool_call>{"arguments": {"a": "',
    "<function=ping><parameter=q>\n",
    "</parameter",
    "<|channel|>",
)

HOLDING = tuple(
    (beginning + '{"arguments": {"a": "', "x") for beginning in ("", "<tool_call>", "[TOOL_CALLS][")
) + tuple((beginning, " ") for beginning in ("<tool_call>", "[TOOL_CALLS]", "["))
"""Beginnings behind which a format cannot know yet whether what comes is a call, and what may come without end."""


@pytest.mark.parametrize("kind", TOOL_FORMATS, ids=lambda kind: kind.name)
def test_work_grows_no_faster_than_the_answer(kind: ToolFormat) -> None:
    for piece in PIECES:
        short, long = (calls_made(kind, (piece * count)[:count]) for count in (2_000, 8_000))
        assert long < 5 * short, piece


@pytest.mark.parametrize("kind", TOOL_FORMATS, ids=lambda kind: kind.name)
def test_text_that_might_become_a_call_is_held_back_up_to_a_limit(kind: ToolFormat) -> None:
    for beginning, piece in (*(("", each) for each in PIECES), *HOLDING):
        parser = kind.parser(TOOLS, str)
        parser.feed(beginning)
        for _ in range(20_000 // len(piece)):
            parser.feed(piece)
        assert sum(len(part[-1]) for part in parser.flush()) <= MAX_HELD + len(piece), beginning + piece


def calls_made(kind: ToolFormat, output: str) -> int:
    parser = kind.parser(TOOLS, str)
    with cProfile.Profile() as profile:
        parser.feed(output)
        parser.flush()
    return sum(entry.callcount for entry in profile.getstats())
