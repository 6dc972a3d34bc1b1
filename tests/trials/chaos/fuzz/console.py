"""Calls of the console's API, by an operator and by others: JSON of [who, method, name, query, body].

The body goes as it is where it is text, and as JSON otherwise. Behind the API is a dispatcher
that computes nothing; the supervisor is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

from router.auth.api_keys import operator_key
from router.auth.auth import NoAuthentication
from router.console.api import API, ConsoleApi, FleetActions
from router.endpoints.app import build_http_app
from router.metrics import RouterMetrics
from router.pins.admin import PinAdmin
from router.requests.request_handler import RequestHandler
from router.server_branch import SupervisorCalls
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.trials.chaos.fuzz.mutate import TEXTS, mutate_json
from tests.trials.chaos.fuzz.target import Target, Try
from tests.unit.router.conftest import ScriptedDispatcher
from twostroke.rpc.membership import Membership

TOKEN = "token-of-the-fuzzed-cluster"
NOWHERE = "127.0.0.1:1"
"""An address at which nobody listens."""
CALLERS = 3
"""One of so many callers is not an operator."""
ANSWER_S = 30.0
ASKED = "asked-before"
"""Id of a request that the router remembers."""
FIELDS = {
    "blocks": {"prompt": "a text of a prompt, which makes more than one block", "tenant": "t", "cache_salt": ""},
    "blocks/chat": {"messages": [{"role": "user", "content": "hi"}], "tools": [], "model": "toy"},
    "drain": {"worker": "decode-0", "deadline_s": 1.5, "restart": True, "force": False},
    "role": {"worker": "decode-0", "role": "prefill"},
    "pins/add": {"text": "pinned text of some blocks, for ever", "owner": "o", "tenant": "", "ttl_s": 5, "role": "all"},
    "pins/remove": {"pin": "0123456789abcdef"},
}  # fmt: skip
QUERIES: dict[str, dict[str, str]] = {
    "about": {},
    "fleet": {"find": "decode"},
    "requests": {"order": "slowest"},
    "request": {"id": ASKED},
    "pins": {},
}


@contextlib.contextmanager
def console() -> Iterator[Try]:
    with asyncio.Runner() as runner:
        app = _app()

        def attempt(data: bytes) -> None:
            try:
                who, method, name, query, body = json.loads(data)
                asked = urlencode({str(key): str(value) for key, value in dict(query).items()}).encode()
                path, method = f"{API}/{name}".partition("/chat")[0], str(method)
                path.encode()
                method.encode("ascii")
                sent = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            except (ValueError, TypeError, AttributeError, RecursionError):
                return
            key = operator_key(TOKEN) if who else "nobody's"
            status, answer = runner.run(_call(app, method, path, asked, key, sent))
            assert status != 500, f"an internal error: {answer!r}"
            assert status != 200 or who, "an answer for who is not an operator"
            if answer and status not in (404, 405):
                json.loads(answer)

        yield attempt


def _app() -> Any:
    dispatcher, metrics = ScriptedDispatcher(), RouterMetrics()
    handler = RequestHandler(dispatcher, InlinePreparer(ByteText()), metrics, model="toy")
    root = dispatcher.recorder.root("request", f"{ASKED}~0123456789abcdef", "")
    root.begin("prepare").end()
    root.end()
    supervisor = SupervisorCalls(NOWHERE, Membership.of(TOKEN, None))
    pins, actions = PinAdmin(handler, supervisor), FleetActions(supervisor)
    api = ConsoleApi(handler, dispatcher.recorder, actions, pins, router_id="router-0")
    return build_http_app(handler, NoAuthentication(TOKEN), max_body_bytes=1 << 16, further=tuple(api.routes()))


async def _call(app: Any, method: str, path: str, query: bytes, key: str, body: bytes) -> tuple[int, bytes]:
    """Returns the status and what was answered. Raises TimeoutError where that takes too long."""
    said = [{"type": "http.request", "body": body, "more_body": False}]
    statuses, parts, ended = list[int](), list[bytes](), asyncio.Event()

    async def receive() -> dict[str, Any]:
        if said:
            return said.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(answer: Any) -> None:
        statuses.extend([answer["status"]] if "status" in answer else [])
        parts.append(answer.get("body", b""))

    headers = [(b"host", b"s"), (b"authorization", f"Bearer {key}".encode()), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": query,
        "headers": headers, "http_version": "1.1", "scheme": "http", "client": ("c", 1), "server": ("s", 1),
    }  # fmt: skip
    async with asyncio.timeout(ANSWER_S):
        await app(scope, receive, send)
    ended.set()
    return statuses[0], b"".join(parts)


def _mutate(data: bytes, draw: random.Random) -> bytes:
    """Changes what is sent more often than where to: most other names are not calls."""
    try:
        who, method, name, query, body = json.loads(data)
    except (ValueError, TypeError):
        return mutate_json(data, draw)
    match draw.randrange(6):
        case 0:
            return mutate_json(data, draw)
        case 1:
            query = {draw.choice(("id", "find", "order")): draw.choice(TEXTS)}
        case 2:
            who = draw.randrange(CALLERS)
        case _:
            with contextlib.suppress(ValueError):
                body = json.loads(mutate_json(json.dumps(body).encode(), draw))
    return json.dumps([who, method, name, query, body]).encode()


def _seeds() -> Sequence[bytes]:
    reads = [[1, "GET", name, query, ""] for name, query in QUERIES.items()]
    writes = [[1, "POST", name, {}, fields] for name, fields in FIELDS.items()]
    return [json.dumps(each).encode() for each in (*reads, *writes)]


CONSOLE = [Target("console", _seeds(), _mutate, console, is_live=True)]
