"""Every field of a body refuses what its declaration does not take, by its name, in every dialect that reads it.

Values are made from the declarations, so that a new field is tried without a case of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from router.endpoints.openapi import body_schema
from router.requests.params import LEAST_SEED, MAX_CHOICES, MAX_STOP_STRINGS, MOST_SEED, MOST_TOKEN_ID
from twostroke.request import LONGEST, MAX_LOGPROBS, RANGES

ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    "/v1/completions": {"prompt": "hi", "logprobs": 1},
    "/v1/responses": {"input": "hi", "include": ["message.output_text.logprobs"]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/detokenize": {"tokens": [1]},
}
OF_EACH_KIND: tuple[Any, ...] = ("other", 3, 1.5, True, [], ["a"], [1], {}, {"a": "b"})
HUGE = int("9" * 4300)

BEYOND: dict[str, tuple[Any, ...]] = {
    **{name: (least - 0.005, most + 0.5, 10**400) for name, (least, most) in RANGES.items() if name != "logit_bias"},
    **{name: (list(range(most + 1)), [-1], [HUGE]) for name, most in LONGEST.items()},
    "logit_bias": (
        *({"5": bound} for bound in (RANGES["logit_bias"][0] - 1, RANGES["logit_bias"][1] + 1)),
        {str(token): 0 for token in range(LONGEST["logit_bias"] + 1)},
        *({wrong: 1} for wrong in ("x", "300", "9" * 5000)),
    ),
    "top_p": (0, 1.1),
    "top_k": (-2, False),
    "n": (0, MAX_CHOICES + 1, -HUGE),
    "seed": (LEAST_SEED - 1, MOST_SEED + 1, HUGE),
    "priority": (HUGE,),
    "logprobs": (-1, MAX_LOGPROBS + 1),
    "top_logprobs": (-1, MAX_LOGPROBS + 1),
    "prompt_logprobs": (-1, MAX_LOGPROBS + 1),
    "allowed_token_ids": ([], [-1], [MOST_TOKEN_ID + 1], [HUGE]),
    "stop": ([""], ["x"] * (MAX_STOP_STRINGS + 1)),
    "stop_sequences": ([""], ["x"] * (MAX_STOP_STRINGS + 1)),
    "max_tokens": (-1, HUGE),
    "max_completion_tokens": (0,),
    "max_output_tokens": (0,),
    "timeout": (-1,),
    "kv_exactness": ("most", "", "x" * 200),
    "speculation": ("fast",),
    "cache_salt": ("", "a" * 1025),
}
"""Values of the right kind on the far side of each bound."""


def values_beyond(name: str, schema: dict[str, Any]) -> Iterator[Any]:
    taken = Draft202012Validator(schema)
    yield from (value for value in OF_EACH_KIND if not taken.is_valid(value))
    yield from BEYOND.get(name, ())


@pytest.mark.parametrize("path", ASKS)
async def test_what_a_field_does_not_take_is_refused_by_its_name(app, path: str) -> None:
    dispatcher, http = app
    fields = body_schema(path)["properties"]
    tried = [(name, value) for name, schema in fields.items() for value in values_beyond(name, schema)]
    assert len(tried) > (5 if path == "/detokenize" else 200)
    for name, value in tried:
        answer = await http.post(path, content=json.dumps({**ASKS[path], name: value}))
        assert answer.status_code == 400, (name, str(value)[:40], answer.text)
        said = answer.json()["error"]
        # Anthropic's errors have no field of their own for the name.
        assert re.search(rf"\b{name}\b", said.get("param") or said["message"]), (name, str(value)[:40], said)
    assert dispatcher.requests == []
