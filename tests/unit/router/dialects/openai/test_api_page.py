"""docs/api.md says of every field what the endpoints do with it: its values are posted, and no field is missing."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from router.dialects.openai import schema as chats
from router.dialects.responses import schema as responses
from router.dialects.responses.items import REFUSED_ITEMS
from router.requests.params import AnswerOptions
from tests.published_api import published_api, published_description
from tests.unit.router.dialects.openai.test_tool_calls import client

PAGE = Path(__file__).resolve().parents[5] / "docs/api.md"
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    TEXT: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
}
REQUESTS = {CHAT: "CreateChatCompletionRequest", TEXT: "CreateCompletionRequest", RESPONSES: "CreateResponse"}
READ: dict[str, tuple[type[BaseModel], ...]] = {
    CHAT: (chats.OpenAIRequest, chats.ChatFields, chats.ChatLogprobs, AnswerOptions),
    TEXT: (chats.OpenAIRequest, chats.TextFields, chats.PromptFields, AnswerOptions),
    RESPONSES: (responses.ResponsesRequest, responses.ResponsesFields),
}
OWN = {
    *("prompts", "options", "is_chat", "custom_names", "given_tools", "structured", "is_prompt_only"),
    "split_special_tokens",
}
"""Names that are not fields of clients, or of completions alone."""


class Row(NamedTuple):
    names: list[str]
    passes: list[Any]
    refused: list[Any]


def rows(heading: str) -> Iterator[Row]:
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n#")[0]
    for line in section.splitlines():
        cells = re.split(r"(?<!\\) \| ", line.strip("| ") + " ") if line.startswith("| `") else []
        if cells:
            names, _, passes, *refused = [*cells, "", ""][:4]
            yield Row(_quoted(names), *(list(map(json.loads, _quoted(cell))) for cell in (passes, refused[0])))


def _quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def rows_of(path: str) -> list[Row]:
    own = list(rows(f"`{path}`"))
    named = {name for row in own for name in row.names}
    common = [row._replace(names=[name for name in row.names if name not in named]) for row in rows("All endpoints")]
    return [*own, *common]


@pytest.mark.parametrize("path", BODIES)
async def test_values_pass_or_are_refused_as_the_page_says(path: str) -> None:
    posted = 0
    async with client("{}") as (_, http):
        for names, passes, refused in rows_of(path):
            for name, value in itertools.product(names, passes):
                got = await http.post(path, json=BODIES[path] | {name: value})
                assert got.status_code == 200, (name, value, got.text)
            for name, value in itertools.product(names, refused):
                got = await http.post(path, json=BODIES[path] | {name: value})
                assert got.status_code == 400, (name, value, got.text)
                assert (got.json()["error"]["param"] or "").startswith(name), (name, value, got.text)
            posted += len(names) * (len(passes) + len(refused))
    assert posted > 60


@pytest.mark.parametrize("path", BODIES)
def test_the_page_has_every_field_that_is_read(path: str) -> None:
    read = {field.alias or name for kind in READ[path] for name, field in kind.model_fields.items()}
    refused = set(responses.REFUSED) if path == RESPONSES else set()
    named = {name for row in rows_of(path) for name in row.names}
    assert (read | refused | set(chats.HARMLESS)) - OWN - named == set()


@pytest.mark.parametrize("path", BODIES)
def test_the_page_has_every_field_that_openais_description_has(path: str) -> None:
    description = published_description()
    if description is None:
        pytest.skip("OpenAI's description (shared/specs/openai-openapi.yaml) lies nowhere above the checkout")
    named = {name for row in rows_of(path) for name in row.names}
    assert published_api(description).properties(REQUESTS[path]) - named == set()


def test_the_page_has_every_item_that_is_refused() -> None:
    for kind in REFUSED_ITEMS:
        assert f"`{kind}`" in PAGE.read_text()
