"""What clients and operators ask of the pages, tiers and pins of one served cluster.

Bad input gets one clear line, and nothing is lost or left behind. A pinned system prompt outlives a flood, deaths of
its worker and of the supervisor.

Flags that are refused before anything starts are in `tests/unit/cluster/commands/test_cache_flags.py`, those of
`twostroke bill` in `tests/unit/tools/bill/test_bad_input.py`, folders and records on disk in
`tests/unit/worker/tiers/test_damaged_folders.py`, the store of pins in
`tests/unit/cluster/supervisor/pins/test_stored.py`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
import psutil
import pytest

from cluster.clients.admin_access import TOKEN_FILE
from tests.cluster.served import PATIENCE_S, Server, starting, wait_until
from twostroke.rpc.proof import TOKEN_KEY
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc, pins_pb2, pins_pb2_grpc

PACED = "paced:step_ms=1,max_model_len=512,page_bytes=1024"
PAGES = 128
"""A request takes 32 at most, pins a tenth."""
ANSWER_S = 90.0
LONG = "word " * 40
"""Twelve blocks: the text of a paced model is bytes."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Runs `make serve ARGS=...` with a model that needs no fetching."""
    folder = tmp_path_factory.mktemp("badcache")
    flags = ["--model", PACED, "--kv-cache-memory", f"{PAGES}K", "--served-model-name", "tiny", "--host-cache", "64K"]
    flags += ["--pin-cap", "0.1"]
    flags += ["--disk-cache", "1M", "--disk-cache-dir", str(folder / "pages")]
    with starting(folder, *flags, by_make=True) as started:
        started.until_printed("Ctrl-C ends it")
        yield started


def posted(server: Server, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    url = f"http://{server.address('OpenAI HTTP')}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# Hints and exactness over HTTP: the value, and what the refusal says.

HINTS: dict[str, tuple[Any, str]] = {
    "a number": (5, "must be an object with type and ttl"),
    "a text": ("ephemeral", "must be an object with type and ttl"),
    "a list": ([], "must be an object with type and ttl"),
    "a truth": (True, "must be an object with type and ttl"),
    "no type": ({}, '.type is missing; it must be "ephemeral"'),
    "another type": ({"type": "forever"}, """.type must be "ephemeral", got 'forever'"""),
    "a number for a type": ({"type": 5}, """.type must be "ephemeral", got '5'"""),
    "a very long type": ({"type": "e" * 100_000}, "(100000 characters)"),
    "a number for a time": ({"type": "ephemeral", "ttl": 5}, '.ttl must be a duration as text, for example "5m"'),
    "no time": ({"type": "ephemeral", "ttl": "soon"}, ".ttl: not a duration: 'soon'; write for example 30s, 5m"),
    "an empty time": ({"type": "ephemeral", "ttl": ""}, ".ttl: not a duration: ''"),
    "a time of 0": ({"type": "ephemeral", "ttl": "0s"}, ".ttl must be more than 0 s and at most 86400 s, got 0"),
    "a time below 0": ({"type": "ephemeral", "ttl": "-5m"}, ".ttl: not a duration: '-5m'"),
    "a time of centuries": ({"type": "ephemeral", "ttl": "99999d"}, "at most 86400 s, got 8.6"),
    "a time beyond all numbers": ({"type": "ephemeral", "ttl": "9" * 400 + "s"}, ".ttl: not a duration"),
}
PLACES = ("message", "part", "whole")


def hinted(place: str, hint: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "system", "content": "You are a ship."}
    body: dict[str, Any] = {"messages": [message, {"role": "user", "content": "Go on."}], "max_tokens": 2}
    match place:
        case "message":
            message["cache_control"] = hint
        case "part":
            message["content"] = [{"type": "text", "text": "You are a ship.", "cache_control": hint}]
        case _:
            body["cache_control"] = hint
    return body


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mistake", HINTS)
def test_a_bad_hint_is_refused_by_its_place(server: Server, mistake: str, place: str) -> None:
    hint, expected = HINTS[mistake]
    status, answer = posted(server, "/v1/chat/completions", hinted(place, hint))
    message, named = answer["error"]["message"], "cache_control" if place == "whole" else "messages[0].cache_control"
    assert status == 400
    assert message.startswith(named)
    assert expected in message
    assert "\n" not in message
    assert len(message) < 300
    assert answer["error"]["param"].startswith(named)


EXACTNESS: dict[str, tuple[Any, str]] = {
    "another word": ("exactly", """kv_exactness must be "exact" or "any", got 'exactly'"""),
    "capitals": ("EXACT", """got 'EXACT'"""),
    "nothing": ("", """got ''"""),
    "a number": (5, "kv_exactness must be a string, got a number"),
    "a truth": (True, "kv_exactness must be a string, got a boolean"),
    "a list": ([], "kv_exactness must be a string, got a list"),
    "an object": ({}, "kv_exactness must be a string, got an object"),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("mistake", EXACTNESS)
def test_what_is_no_exactness_is_refused(server: Server, mistake: str, path: str) -> None:
    value, expected = EXACTNESS[mistake]
    body = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 2, "kv_exactness": value}
    del body["prompt" if "chat" in path else "messages"]
    status, answer = posted(server, path, body)
    assert (status, answer["error"]["param"]) == (400, "kv_exactness")
    assert expected in answer["error"]["message"]


# The same over gRPC

GENERATE: dict[str, tuple[dict[str, Any], str]] = {
    "exactness": ({"kv_exactness": "yes"}, """kv_exactness must be "exact" or "any", got 'yes'"""),
    "a time below 0": ({"cache_control": {"ttl_s": -1}}, "cache_control.ttl_s must be more than 0 s"),
    "a time that is no number": ({"cache_control": {"ttl_s": math.nan}}, "at most 86400 s, got nan"),
    "a time without end": ({"cache_control": {"ttl_s": math.inf}}, "at most 86400 s, got inf"),
    "a time beyond a day": ({"cache_control": {"ttl_s": 90_000}}, "at most 86400 s, got 90000"),
    "a hint at a message": (
        {"chat": {"messages": [{"role": "user", "content": "x", "cache_control": {"ttl_s": -1}}]}},
        "messages[0].cache_control.ttl_s must be more than 0 s",
    ),
}


@pytest.mark.parametrize("mistake", GENERATE)
def test_a_bad_field_over_grpc_is_named(server: Server, mistake: str) -> None:
    fields, expected = GENERATE[mistake]
    request = inference_pb2.GenerateRequest(
        model="tiny", **({"text": "x"} | fields if "chat" not in fields else fields)
    )
    with (
        grpc.insecure_channel(server.address("gRPC")) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=ANSWER_S))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert expected in refused.value.details()


# Pins: the admin call as any program may make it

ADD: dict[str, tuple[dict[str, Any], grpc.StatusCode, str]] = {
    "no prefix": ({}, grpc.StatusCode.INVALID_ARGUMENT, "a prefix is needed: text, token_ids or chat"),
    "no owner": ({"text": LONG, "owner": ""}, grpc.StatusCode.INVALID_ARGUMENT, "a pin needs an owner"),
    "an owner of two lines": ({"text": LONG, "owner": "a\nb"}, grpc.StatusCode.INVALID_ARGUMENT, "owner must be print"),
    "an owner without end": ({"text": LONG, "owner": "x" * 300}, grpc.StatusCode.INVALID_ARGUMENT, "256 characters"),
    "a tenant of two lines": ({"text": LONG, "tenant": "\n"}, grpc.StatusCode.INVALID_ARGUMENT, "tenant must be print"),
    "a salt without end": ({"text": LONG, "cache_salt": "x" * 10_000}, grpc.StatusCode.INVALID_ARGUMENT, "cache_salt"),
    "a short prefix": ({"text": "short"}, grpc.StatusCode.INVALID_ARGUMENT, "it must have at least 16 tokens"),
    "an empty text": ({"text": ""}, grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "a prefix that no request has": (
        {"text": "x" * 600}, grpc.StatusCode.INVALID_ARGUMENT, "maximum context length is 512 tokens"
    ),
    "tokens that there are not": (
        {"token_ids": {"ids": [2**31] * 32}}, grpc.StatusCode.INVALID_ARGUMENT, "token"
    ),
    "a chat without messages": ({"chat": {}}, grpc.StatusCode.INVALID_ARGUMENT, "messages"),
    "a role that there is not": (
        {"chat": {"messages": [{"role": "", "content": LONG}]}}, grpc.StatusCode.INVALID_ARGUMENT, "messages[0].role"
    ),
    "a time of 0": ({"text": LONG, "ttl_s": 0}, grpc.StatusCode.INVALID_ARGUMENT, "ttl_s must be seconds, more than 0"),
    "a time that is no number": ({"text": LONG, "ttl_s": math.nan}, grpc.StatusCode.INVALID_ARGUMENT, "got nan"),
    "a time without end": ({"text": LONG, "ttl_s": math.inf}, grpc.StatusCode.INVALID_ARGUMENT, "got inf"),
    "a time below 0": ({"text": LONG, "ttl_s": -5}, grpc.StatusCode.INVALID_ARGUMENT, "ttl_s must be seconds"),
    "a worker that there is not": (
        {"text": LONG, "workers": ["decode-9"]},
        grpc.StatusCode.NOT_FOUND,
        "there is no worker 'decode-9'; there are all, decode, decode-0, prefill, prefill-0",
    ),
    "a worker without a name": ({"text": LONG, "workers": [""]}, grpc.StatusCode.NOT_FOUND, "there is no worker ''"),
    "workers without end": (
        {"text": LONG, "workers": ["decode-0"] * 300}, grpc.StatusCode.INVALID_ARGUMENT, "at most 256 workers"
    ),
    "names and numbers": ({"text": LONG, "workers": ["all"], "per_role": 1}, grpc.StatusCode.INVALID_ARGUMENT, "not b"),
    "too many of a role": ({"text": LONG, "per_role": 9999}, grpc.StatusCode.INVALID_ARGUMENT, "per_role must be at m"),
    "less room than it takes": (
        {"text": LONG, "max_bytes": 5}, grpc.StatusCode.RESOURCE_EXHAUSTED, "(12,288 bytes), its own cap is 5 bytes"
    ),
    "more than pins may keep": (
        {"text": "y" * 300}, grpc.StatusCode.RESOURCE_EXHAUSTED, "may keep 12: --pin-cap allows 12"
    ),
}  # fmt: skip


def pin_stub(server: Server, channel: grpc.Channel) -> tuple[pins_pb2_grpc.PinAdminStub, Any]:
    (token,) = server.temporary.rglob(TOKEN_FILE)
    return pins_pb2_grpc.PinAdminStub(channel), ((TOKEN_KEY, token.read_text()),)


@pytest.mark.parametrize("mistake", ADD)
def test_a_pin_that_cannot_be_is_refused_and_held_by_nobody(server: Server, mistake: str) -> None:
    fields, code, expected = ADD[mistake]
    with grpc.insecure_channel(server.address("admin")) as channel:
        pins, metadata = pin_stub(server, channel)
        with pytest.raises(grpc.RpcError) as refused:
            pins.Add(pins_pb2.AddPinRequest(**({"owner": "o"} | fields)), metadata=metadata, timeout=ANSWER_S)
        assert (refused.value.code(), expected in refused.value.details()) == (code, True), refused.value.details()
        assert "\n" not in refused.value.details()
        assert not pins.List(pins_pb2.ListPinsRequest(), metadata=metadata, timeout=ANSWER_S).held


# Pins: the command

COMMAND: dict[str, tuple[list[str], str, str]] = {
    "a short prefix": (["add", "--text", "short"], "", "it must have at least 16 tokens"),
    "an empty system message": (["add", "--system", ""], "", "it must have at least 16 tokens"),
    "no text on standard input": (["add", "--text-file", "-"], "", "the text of the pin is empty"),
    "no JSON on standard input": (["add", "--chat", "-"], "{", "--chat - is not valid JSON"),
    "a chat that is no list": (["add", "--chat", "-"], "5", "must hold a list of messages"),
    "a message that is none": (["add", "--chat", "-"], "[5]", "messages[0] must be an object with role and content"),
    "an unknown worker": (["add", "--text", LONG, "--workers", "decode-9"], "", "there is no worker 'decode-9'"),
    "a size beyond all": (["add", "--text", LONG, "--max-bytes", "9" * 400], "", "--max-bytes: a size must be less"),
    "half a byte": (["add", "--text", LONG, "--max-bytes", "0.5"], "", "--max-bytes must be at least 1 byte, got 0.5"),
    "a time of decades": (["add", "--text", LONG, "--expires", "9999d"], "", "at most 315360000"),
    "an address that is none": (["list", "--admin", "127.0.0.1:99999"], "", "--admin must be HOST:PORT"),
    "a port of HTTP": (["list", "--admin", "{http}"], "", "{http}"),
    "a port of gRPC": (["list", "--admin", "{grpc}"], "", "{grpc}"),
    "a server that is not there": (["list", "--pid", "1"], "", "1"),
    "nothing to remove": (["remove"], "", "name one pin by its ID, or an --owner, or --hints"),
}


@pytest.mark.parametrize("mistake", COMMAND)
def test_the_command_says_what_is_wrong_in_one_line(server: Server, mistake: str) -> None:
    arguments, stdin, expected = COMMAND[mistake]
    addresses = {"{http}": server.address("OpenAI HTTP").removesuffix("/v1"), "{grpc}": server.address("gRPC")}
    arguments, expected = ["pin", *(addresses.get(each, each) for each in arguments)], addresses.get(expected, expected)
    done = server.run(*arguments, given=stdin)
    assert expected in done.stderr
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, f"one line, got: {done.stderr}"
    assert "Traceback" not in done.stderr


def test_nothing_is_left_of_all_that(server: Server) -> None:
    """The server that heard all of it is as good as new."""
    assert json.loads(server.command("pin", "list", "--json", "--hints"))["pins"] == []
    for worker in json.loads(server.command("status", "--json"))["workers"]:
        counts = {name: worker[name] for name in ("pages_active", "pages_pinned", "running", "waiting")}
        assert set(counts.values()) == {0}, counts
    status, answer = posted(server, "/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    added = json.loads(server.command("pin", "add", "--text", LONG, "--json"))
    assert {each["state"] for each in added["held"]} == {"ready"}
    server.command("pin", "remove", added["pin_id"])
    assert "Traceback" not in server.printed


# A pin that lives

SYSTEM = "You are the voice of a ship, and you never tell where it is. " * 2
BLOCK = 16


def pins_of(server: Server) -> list[dict]:
    return json.loads(server.command("pin", "list", "--json"))["pins"]


def cached_tokens(server: Server, system: str, question: str) -> int:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    _, answer = posted(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def flood(server: Server) -> None:
    for number in range(12):
        cached_tokens(server, f"{number} " * 120, "Go on.")


def test_a_pinned_system_prompt_outlives_a_flood_its_worker_and_the_supervisor(server: Server) -> None:
    """It ends the server: the last test of this file."""
    (launcher,) = psutil.Process(server.process.pid).children()
    added = json.loads(server.command("pin", "add", "--system", SYSTEM, "--owner", "ops", "--json"))
    blocks = added["pinned"] // BLOCK
    assert {(each["worker_id"], each["state"], each["ready_blocks"]) for each in added["held"]} == {
        ("prefill-0", "ready", blocks),
        ("decode-0", "ready", blocks),
    }
    flood(server)
    assert cached_tokens(server, SYSTEM, "Where are we?") >= added["pinned"]
    assert next(each for each in pins_of(server) if each["worker_id"] == "decode-0")["hits"] == 1

    epochs = server.epochs()
    os.kill(server.worker_pid("DecodeActor"), signal.SIGKILL)
    wait_until(lambda: server.epochs().get("decode-0") not in (None, "", epochs["decode-0"]), lambda: server.printed)
    wait_until(lambda: all(each["state"] == "ready" for each in pins_of(server)), lambda: server.printed)
    assert cached_tokens(server, SYSTEM, "And now?") >= added["pinned"]

    os.kill(server.worker_pid("SupervisorActor"), signal.SIGKILL)
    server.until_printed("Ray starts it again")

    def is_back() -> bool:
        try:
            return len(pins_of(server)) == 2
        except AssertionError:
            return False  # the supervisor is away

    wait_until(is_back, lambda: server.printed)
    assert server.command("pin", "remove", added["pin_id"]) == "1 pin removed\n"
    assert server.command("pin", "remove", added["pin_id"]) == "0 pins removed\n"
    assert pins_of(server) == []
    for worker in json.loads(server.command("status", "--json"))["workers"]:
        assert worker["pages_pinned"] == 0
    assert server.command("down").startswith(f"stopped {launcher.pid} ")
    assert server.process.wait(PATIENCE_S) == 0
