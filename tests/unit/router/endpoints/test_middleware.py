"""Pages in browsers: which may call, which are told so, and under which names a router on loopback is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from router.endpoints.app import build_http_app
from router.endpoints.middleware import browser_middleware
from router.metrics import RouterMetrics
from router.requests.request_handler import RequestHandler
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.unit.router.conftest import ScriptedDispatcher
from twostroke.base.errors import ConfigError
from twostroke.config import EndpointsConfig

APP = "https://app.example.com"
TEXT = "/v1/completions"
ASKED = {"prompt": "a"}
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@asynccontextmanager
async def router(frontend: EndpointsConfig, host: str = "127.0.0.1") -> AsyncIterator[httpx.AsyncClient]:
    handler = RequestHandler(ScriptedDispatcher(), InlinePreparer(ByteText()), RouterMetrics(), model="toy")
    app = build_http_app(handler, max_body_bytes=1 << 16, outer=browser_middleware(frontend, host))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost:8000") as http:
        yield http


async def test_without_cors_no_page_of_another_origin_is_told_anything() -> None:
    async with router(EndpointsConfig(), "0.0.0.0") as http:
        answer = await http.post(TEXT, json=ASKED, headers={"origin": APP})
        assert answer.status_code == 200, "an open port does not look at names: that is for whoever opened it"
        preflight = await http.options(TEXT, headers={"origin": APP, **PREFLIGHT})
        assert preflight.status_code == 405
        for each in (answer, preflight):
            assert not [name for name in each.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [(APP,), ("https://other.example.com", APP), ("*",)])
async def test_pages_of_the_origins_that_are_named_may_call(origins: tuple[str, ...]) -> None:
    async with router(EndpointsConfig(cors_origins=origins)) as http:
        preflight = await http.options(TEXT, headers={"origin": APP, **PREFLIGHT})
        assert preflight.status_code == 200
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        answers = [
            await http.post(TEXT, json=ASKED, headers={"origin": APP}),
            await http.post(TEXT, json={**ASKED, "stream": True}, headers={"origin": APP}),
            await http.post(TEXT, json={**ASKED, "model": "gpt"}, headers={"origin": APP}),
            await http.post(TEXT, json=ASKED, headers={"origin": APP, "x-request-id": "\x7f"}),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 404, 400]
        for answer in (preflight, *answers):
            assert answer.headers["access-control-allow-origin"] == ("*" if origins == ("*",) else APP)
            assert "access-control-allow-credentials" not in answer.headers
        assert "x-request-id" in answers[0].headers["access-control-expose-headers"]


async def test_pages_of_other_origins_may_not() -> None:
    async with router(EndpointsConfig(cors_origins=(APP,))) as http:
        for origin in ("https://evil.example.com", "null", "http://app.example.com", APP + ".evil.org"):
            assert (await http.options(TEXT, headers={"origin": origin, **PREFLIGHT})).status_code == 400
            answer = await http.post(TEXT, json=ASKED, headers={"origin": origin})
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_on_loopback_a_page_cannot_send_what_a_browser_does_not_ask_about(kind: str) -> None:
    async with router(EndpointsConfig()) as http:
        typed = {"content-type": kind} if kind else {}
        posted = await http.post(TEXT, content='{"prompt": "a"}', headers={**typed, "origin": "https://evil.org"})
        assert posted.status_code == 403
        assert posted.json()["error"]["type"] == "invalid_request_error"
        without_origin = await http.post(TEXT, content='{"prompt": "a"}', headers=typed)
        assert without_origin.status_code == (415 if kind else 200)
    async with router(EndpointsConfig(), "0.0.0.0") as http:
        posted = await http.post(TEXT, content='{"prompt": "a"}', headers={**typed, "origin": "https://evil.org"})
        assert posted.status_code == 415, "JSON needs a preflight, and nobody answers that"


async def test_a_page_that_this_server_shows_is_its_own() -> None:
    async with router(EndpointsConfig()) as http:
        assert (await http.post(TEXT, json=ASKED, headers={"origin": "http://localhost:8000"})).status_code == 200
        assert (await http.post(TEXT, json=ASKED, headers={"origin": "http://localhost:9000"})).status_code == 403


@pytest.mark.parametrize(
    ("frontend", "bound", "host", "status"),
    [
        (EndpointsConfig(), "127.0.0.1", "localhost", 200),
        (EndpointsConfig(), "127.0.0.1", "127.0.0.1:8000", 200),
        (EndpointsConfig(), "127.0.0.1", "127.8.9.1", 200),
        (EndpointsConfig(), "::1", "[::1]:8000", 200),
        (EndpointsConfig(), "127.0.0.1", "evil.org:8000", 421),
        (EndpointsConfig(), "127.0.0.1", "localhost.evil.org", 421),
        (EndpointsConfig(), "127.0.0.1", "[", 421),
        (EndpointsConfig(), "::1", "evil.org", 421),
        (EndpointsConfig(), "localhost", "evil.org", 421),
        (EndpointsConfig(), "0.0.0.0", "llm.example.com", 200),
        (EndpointsConfig(api_keys="keys.yaml"), "127.0.0.1", "llm.example.com", 200),
        (EndpointsConfig(allowed_hosts=("llm.example.com",)), "127.0.0.1", "LLM.example.com:443", 200),
        (EndpointsConfig(allowed_hosts=("llm.example.com",)), "127.0.0.1", "localhost", 200),
        (EndpointsConfig(allowed_hosts=("llm.example.com",)), "0.0.0.0", "other.example.com", 421),
        (EndpointsConfig(allowed_hosts=("*",)), "127.0.0.1", "other.example.com", 200),
    ],
)
async def test_on_loopback_a_foreign_name_is_refused(
    frontend: EndpointsConfig, bound: str, host: str, status: int
) -> None:
    async with router(frontend, bound) as http:
        for path in ("/v1/models", "/live"):
            assert (await http.get(path, headers={"host": host})).status_code == status


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"cors_origins": ("app.example.com",)}, "--cors-origin must be"),
        ({"cors_origins": ("https://app.example.com/",)}, "--cors-origin must be"),
        ({"cors_origins": ("https://App.example.com",)}, "--cors-origin must be"),
        ({"cors_origins": ("",)}, "--cors-origin must be"),
        ({"allowed_hosts": ("llm.example.com:8000",)}, "--allowed-host must be"),
        ({"allowed_hosts": ("http://llm",)}, "--allowed-host must be"),
        ({"allowed_hosts": ("",)}, "--allowed-host must be"),
    ],
)
def test_origins_and_names_that_no_browser_sends_are_refused(wrong: dict[str, tuple[str, ...]], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EndpointsConfig(**wrong)  # type: ignore[arg-type]  # one of its fields


def test_good_ones_are_taken() -> None:
    EndpointsConfig(
        cors_origins=("*", "http://localhost:3000", "https://[::1]:8443"), allowed_hosts=("LLM", "::1", "*")
    )
