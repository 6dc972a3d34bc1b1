"""The limits in docs/api.md are those that the code declares, and what is outside of them is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest

from router import json_body
from router.auth.api_keys import MOST_PRIORITY
from router.dialects.openai.chat_messages import MAX_TOOLS
from router.requests import params
from router.text import cache_hints, prompts
from router.text.structured.fields import MOST_CHOICES
from tests.unit.router.conftest import Frontend
from tests.unit.router.dialects.openai.test_api_page import PAGE
from twostroke import request
from twostroke.rpc.channel import MOST_TIMEOUT_S

TEXT = "/v1/completions"
DECLARED: Mapping[str, tuple[str, ...]] = {
    "seed": (f"from {params.LEAST_SEED} to {params.MOST_SEED}",),
    "max_tokens": (f"from 1 to {request.MOST_TOKENS}",),
    "max_completion_tokens": (f"from 1 to {request.MOST_TOKENS}",),
    "stop": (f"at most {params.MAX_STOP_STRINGS} strings", f"1 to {params.MAX_STOP_CHARS} characters"),
    "logprobs": (f"from 0 to {request.MAX_LOGPROBS}",),
    "top_logprobs": (f"from 0 to {request.MAX_LOGPROBS}",),
    "prompt_logprobs": (f"from 0 to {request.MAX_LOGPROBS}",),
    "n": (f"from 1 to {params.MAX_CHOICES}", f"at most {params.MAX_ANSWERS} answers"),
    "prompt": (f"at most {params.MAX_PROMPTS} entries",),
    "messages": (f"at most {prompts.MAX_MESSAGES}",),
    "tools": (f"at most {MAX_TOOLS}",),
    "cache_salt": (f"from 1 to {params.MAX_SALT_CHARS} characters",),
    "user": (f"at most {params.MAX_REQUEST_ID_CHARS} printable",),
    "cache_control": (f"at most {request.LONGEST_HINT_S:.0f} seconds", f"last {cache_hints.MOST_HINTS}"),
    "timeout": (f"count as {MOST_TIMEOUT_S:.0f}",),
    "priority": (f"below -{MOST_PRIORITY} and above {MOST_PRIORITY}",),
    "structured_outputs.choice": (f"at most {MOST_CHOICES} strings",),
    "a grammar": (f"at most {request.MAX_GRAMMAR_CHARS} characters",),
    "any integer": (f"at most {json_body.MOST_BITS} bits",),
    **{name: (f"from {least:g} to {most:g}",) for name, (least, most) in request.RANGES.items()},
}
IN_TABLE = {
    *("LEAST_SEED", "MOST_SEED", "MOST_TOKENS", "MAX_STOP_STRINGS", "MAX_STOP_CHARS", "MAX_LOGPROBS", "MAX_CHOICES"),
    *("MAX_ANSWERS", "MAX_PROMPTS", "MAX_MESSAGES", "MAX_SALT_CHARS", "MAX_REQUEST_ID_CHARS", "LONGEST_HINT_S"),
    *("MOST_PRIORITY", "MAX_GRAMMAR_CHARS", "LONGEST"),
}
ELSEWHERE = {"MAX_ID_DIGITS", "MOST_TOKEN_ID"}
"""Limits of the text of a token id, and of sets of them: no vocabulary has such tokens."""


def table() -> dict[str, str]:
    section = PAGE.read_text().partition("## Limits\n")[2].partition("\n#")[0]
    found = {}
    for line in section.splitlines():
        cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and len(cells) == 2:
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[0]) or [cells[0]], cells[1])
    return found


def test_the_table_has_every_limit_that_is_declared() -> None:
    said = table()
    lists = {name: (f"at most {most} long",) for name, most in request.LONGEST.items()}
    for declared in (DECLARED, lists):
        for name, words in declared.items():
            assert all(word in said[name] for word in words), (name, words, said.get(name))


def test_a_limit_that_is_added_comes_into_the_table() -> None:
    declared = {
        name for kind in (params, prompts, request) for name in vars(kind) if re.match("(MAX|MOST|LEAST|LONGEST)", name)
    }
    assert declared == IN_TABLE | ELSEWHERE


@pytest.mark.parametrize("name", request.RANGES)
async def test_both_ends_of_a_range_pass_and_what_is_beyond_is_refused(frontend: Frontend, name: str) -> None:
    least, most = request.RANGES[name]
    for value, status in (
        (least, 200),
        (most, 200),
        (math.nextafter(least, -math.inf), 400),
        (math.nextafter(most, math.inf), 400),
    ):
        sent: Any = {"65": value} if name == "logit_bias" else value
        got = await frontend.http.post(TEXT, json={"prompt": "a", name: sent})
        assert got.status_code == status, (value, got.text)
        assert status == 200 or got.json()["error"]["param"] == name


@pytest.mark.parametrize("name", request.LONGEST)
async def test_a_list_of_tokens_may_be_as_long_as_is_declared(frontend: Frontend, name: str) -> None:
    for count, status, param in ((request.LONGEST[name], 200, None), (request.LONGEST[name] + 1, 400, name)):
        sent: Any = dict.fromkeys(map(str, range(count)), 0) if name == "logit_bias" else [7] * count
        got = await frontend.http.post(TEXT, json={"prompt": "a", "logprobs": 0, name: sent})
        assert (got.status_code, got.json().get("error", {}).get("param")) == (status, param)
