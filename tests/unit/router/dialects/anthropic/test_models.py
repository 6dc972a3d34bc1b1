"""`/v1/models` in the form of Anthropic's API, which its clients get."""

from __future__ import annotations

import pytest

from router.dialects.anthropic.models import ListedModel, model_page
from tests.unit.router.conftest import FACTS
from twostroke.base.errors import InvalidRequest

ASKED = {"anthropic-version": "2023-06-01"}
MODELS = [ListedModel(name=name, created_s=0, context_tokens=None) for name in "abcde"]


async def test_a_model_is_listed_and_found_in_anthropics_form(app):
    _, http = app
    page = (await http.get("/v1/models", headers=ASKED)).json()
    (info,) = page.pop("data")
    assert page == {"has_more": False, "first_id": "toy", "last_id": "toy"}
    assert info.pop("created_at").endswith("Z")
    assert info == {
        "type": "model",
        "id": "toy",
        "display_name": "toy",
        "lifecycle": "active",
        "max_input_tokens": FACTS.context_tokens,
        "max_tokens": FACTS.context_tokens,
    }
    found = (await http.get("/v1/models/toy", headers=ASKED)).json()
    assert found == {**info, "created_at": found["created_at"]}
    assert (await http.get("/v1/models")).json()["object"] == "list", "other clients get OpenAI's form"


async def test_what_is_wrong_is_said_in_the_form_of_who_asks(app):
    _, http = app
    missing = await http.get("/v1/models/nothing", headers=ASKED)
    assert (missing.status_code, missing.json()["type"]) == (404, "error")
    assert missing.json()["error"]["type"] == "not_found_error"
    wrong = await http.get("/v1/models?limit=0", headers=ASKED)
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "limit" in wrong.json()["error"]["message"]
    assert "type" not in (await http.get("/v1/models/nothing")).json()


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ({}, "abcde", False),
        ({"limit": "2"}, "ab", True),
        ({"limit": "2", "after_id": "b"}, "cd", True),
        ({"limit": "2", "after_id": "c"}, "de", False),
        ({"after_id": "e"}, "", False),
        ({"after_id": "z"}, "", False),
        ({"limit": "2", "before_id": "d"}, "bc", True),
        ({"limit": "2", "before_id": "c"}, "ab", False),
        ({"before_id": "z"}, "", False),
    ],
)
def test_a_page_begins_and_ends_where_the_client_says(query, names, has_more):
    page = model_page(MODELS, query)
    assert "".join(info["id"] for info in page["data"]) == names
    assert page["has_more"] is has_more
    assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))


@pytest.mark.parametrize(
    "query", [{"limit": "1001"}, {"limit": "x"}, {"limit": "²"}, {"after_id": "a", "before_id": "b"}]
)
def test_a_page_that_cannot_be_is_refused_by_name(query):
    with pytest.raises(InvalidRequest) as caught:
        model_page(MODELS, query)
    assert caught.value.field in query
