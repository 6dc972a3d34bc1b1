"""The console answers operators alone, from its own page, and its page allows itself little."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from router.auth.api_keys import KeyEntry, KeyFile, OperatorKey, draw_key, operator_key
from tests.unit.router.console.helpers import OPERATOR, TOKEN, console
from twostroke.base.json_values import to_json

READS = ("about", "fleet", "requests", "request", "pins")
WRITES = ("blocks", "drain", "role", "pins/add", "pins/remove")
STATIC = resources.files("router.console") / "static"


async def test_every_call_asks_for_an_operators_key() -> None:
    wrong = {"authorization": f"Bearer {operator_key('of another cluster')}"}
    async with console() as frontend:
        for headers in ({}, wrong, {"authorization": f"Bearer {TOKEN}"}):
            for name in READS:
                answer = await frontend.http.get(f"/console/api/{name}", headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            for name in WRITES:
                answer = await frontend.http.post(f"/console/api/{name}", json={}, headers=headers)
                assert answer.status_code == 401
        assert (await frontend.http.get("/console/api/about", headers=OPERATOR)).json()["model"] == "toy"


def test_a_cluster_without_a_token_has_no_operator() -> None:
    for shown in (f"Bearer {operator_key('')}", "Bearer ", ""):
        assert not OperatorKey("").is_in(shown)
    assert operator_key("a") != operator_key("b")
    assert TOKEN not in operator_key(TOKEN)


async def test_where_clients_have_keys_only_those_of_operators_open_it(tmp_path: Path) -> None:
    client, colleague = draw_key(), draw_key()
    entries = {
        client.id: KeyEntry(tenant="acme", sha256=client.sha256),
        colleague.id: KeyEntry(tenant="ops", sha256=colleague.sha256, operator=True),
    }
    keys = tmp_path / "keys.yaml"
    keys.write_text(to_json(KeyFile(keys=entries)))
    body = {"prompt": "hello", "max_tokens": 2}
    async with console(keys=keys) as frontend:
        assert (await frontend.http.get("/console")).status_code == 200
        for key, status in ((client.key, 401), (colleague.key, 200)):
            shown = {"authorization": f"Bearer {key}"}
            assert (await frontend.http.get("/console/api/about", headers=shown)).status_code == status
        # The operator's own key opens the playground, too.
        assert (await frontend.http.post("/v1/completions", json=body)).status_code == 401
        assert (await frontend.http.post("/v1/completions", json=body, headers=OPERATOR)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "https://other.example"},
    ],
)
async def test_no_other_web_page_can_call_it(headers: dict[str, str]) -> None:
    async with console() as frontend:
        answer = await frontend.http.get("/console/api/fleet", headers=OPERATOR | headers)
        assert answer.status_code == 403
        acted = await frontend.http.post("/console/api/drain", json={"worker": "decode-0"}, headers=OPERATOR | headers)
        assert acted.status_code == 403


async def test_its_own_page_can_call_it_and_actions_are_json() -> None:
    async with console() as frontend:
        own = OPERATOR | {"origin": frontend.url, "sec-fetch-site": "same-origin"}
        assert (await frontend.http.get("/console/api/fleet", headers=own)).status_code == 200
        plain = own | {"content-type": "text/plain"}
        answer = await frontend.http.post("/console/api/drain", content=b'{"worker":"decode-0"}', headers=plain)
        assert answer.status_code == 415
        for body in ({"worker": 3}, {"worker": "decode-0", "deadline_s": True}, {"who": "decode-0"}, {"worker": ""}):
            answer = await frontend.http.post("/console/api/drain", json=body, headers=own)
            assert answer.status_code == 400, body


async def test_the_page_lets_no_other_host_and_no_inline_script_in() -> None:
    async with console() as frontend:
        paths = ["/console", *(f"/console/static/{each.name}" for each in STATIC.iterdir())]
        answers = [await frontend.http.get(path) for path in paths]
        answers.append(await frontend.http.get("/console/api/fleet", headers=OPERATOR))
        for answer in answers:
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert "http" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        again = await frontend.http.get("/console", headers={"if-none-match": answers[0].headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert (await frontend.http.get("/console/static/none.js")).status_code == 404
        assert (await frontend.http.get("/console/static/..%2fapi.py")).status_code == 404


def test_its_files_hold_no_markup_made_of_text_and_no_address_of_another_host() -> None:
    for each in STATIC.iterdir():
        text = each.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
        assert not re.search(r"(?<!=\")https?://(?!www\.w3\.org/2000/svg)", text), each.name
        assert not re.search(r"<script(?! type=\"module\" src=)|\son\w+=\"|style=\"", text), each.name
