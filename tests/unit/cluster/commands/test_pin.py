"""`twostroke pin`: what it asks for, what it says, and one clear line for each mistake."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from tools.cli import main
from twostroke.rpc.v1 import pins_pb2, pins_pb2_grpc

NOWHERE = ["--admin", "127.0.0.1:1"]


class Router(pins_pb2_grpc.PinAdminServicer):
    """A router whose pin is computed at the second look."""

    def __init__(self) -> None:
        self.added: list[pins_pb2.AddPinRequest] = []
        self.removed: list[pins_pb2.RemovePinRequest] = []
        self.looks = 0
        self.hints_asked: list[bool] = []
        self.problem = ""
        self.text = "You are\na ship"
        self.final = pins_pb2.PIN_STATE_READY

    def Add(self, request: pins_pb2.AddPinRequest, context: object) -> pins_pb2.AddPinResponse:  # noqa: N802
        self.added.append(request)
        held = [self._held(pins_pb2.PIN_STATE_COMPUTING, 1)]
        return pins_pb2.AddPinResponse(pin_id="0a1b", tokens=37, pinned_tokens=32, held=held)

    def Remove(self, request: pins_pb2.RemovePinRequest, context: object) -> pins_pb2.RemovePinResponse:  # noqa: N802
        self.removed.append(request)
        return pins_pb2.RemovePinResponse(removed=1)

    def List(self, request: pins_pb2.ListPinsRequest, context: object) -> pins_pb2.ListPinsResponse:  # noqa: N802
        self.looks += 1
        self.hints_asked.append(request.hints)
        use = pins_pb2.PinUse(worker_id="decode-0", pages_total=64, pages_pinned=2, most_pages=16, page_bytes=1 << 20)
        state = self.final if self.looks > 1 else pins_pb2.PIN_STATE_COMPUTING
        return pins_pb2.ListPinsResponse(held=[self._held(state, 2)], uses=[use])

    def _held(self, state: pins_pb2.PinState, ready: int) -> pins_pb2.HeldPin:
        return pins_pb2.HeldPin(
            worker_id="decode-0", pin_id="0a1b", owner="ops", state=state, blocks=2, ready_blocks=ready,
            bytes=2 << 20, hits=7, saved_s=1.5, text=self.text, problem=self.problem,
        )  # fmt: skip


@pytest.fixture
def router() -> Iterator[tuple[Router, list[str]]]:
    server, service = grpc.server(futures.ThreadPoolExecutor(2)), Router()
    pins_pb2_grpc.add_PinAdminServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, ["--admin", f"127.0.0.1:{port}"]
    server.stop(None).wait()


def test_add_waits_until_the_pin_is_computed_and_says_what_is_beyond_the_last_block(router, capsys) -> None:
    service, admin = router
    assert main(["pin", "add", "--system", "You are a ship", "--expires", "5m", "--max-bytes", "3M", *admin]) == 0
    printed = capsys.readouterr().out
    assert "pin 0a1b: 32 of 37 tokens are pinned; 5 beyond the last full block are not" in printed
    assert "ready" in printed
    (request,) = service.added
    assert [(each.role, each.content) for each in request.chat.messages] == [("system", "You are a ship")]
    assert (request.ttl_s, request.max_bytes, list(request.workers), request.owner) == (
        300,
        3 << 20,
        ["all"],
        "operator",
    )
    assert service.looks == 2


def test_add_ends_with_1_where_the_pin_is_not_computed_in_time_or_fails(router, capsys) -> None:
    service, admin = router
    service.final = pins_pb2.PIN_STATE_FAILED
    assert main(["pin", "add", "--text", "You are a ship", *admin]) == 1
    assert "failed" in capsys.readouterr().out
    service.final, service.looks = pins_pb2.PIN_STATE_COMPUTING, 0
    assert main(["pin", "add", "--text", "You are a ship", "--wait", "0.3s", *admin]) == 1
    assert main(["pin", "add", "--text", "You are a ship", "--wait", "0s", *admin]) == 0


def test_add_says_which_serving_worker_has_not_answered_and_waits_for_it_but_for_none_that_is_down(
    router, capsys
) -> None:
    service, admin = router
    adding = ["pin", "add", "--text", "You are a ship", "--wait", "0.5s", *admin]
    service.final, service.problem = pins_pb2.PIN_STATE_AWAY, "it is given again and again"
    assert main(adding) == 1
    assert "it is given again and again" in capsys.readouterr().out
    service.problem, service.looks = "", 0
    assert main(adding) == 0


@pytest.mark.parametrize(
    ("said", "workers", "per_role"),
    [("all", ["all"], 0), ("decode", ["decode"], 0), ("decode-0,prefill", ["decode-0", "prefill"], 0), ("2", [], 2)],
)
def test_workers_are_all_a_role_names_or_a_number_of_each(router, said, workers, per_role) -> None:
    service, admin = router
    assert main(["pin", "add", "--text", "x", "--wait", "0s", "--workers", said, "--json", *admin]) == 0
    assert (list(service.added[0].workers), service.added[0].per_role) == (workers, per_role)


def test_a_chat_comes_from_a_list_or_a_body(router, tmp_path: Path) -> None:
    service, admin = router
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    for content in (messages, {"model": "m", "messages": messages}):
        (tmp_path / "chat.json").write_text(json.dumps(content))
        assert main(["pin", "add", "--chat", str(tmp_path / "chat.json"), "--wait", "0s", *admin]) == 0
        assert [each.content for each in service.added[-1].chat.messages] == ["Be brief.", "Hi"]


def test_list_shows_bytes_hits_and_seconds_and_the_caps(router, capsys) -> None:
    service, admin = router
    service.looks = 1
    assert main(["pin", "list", *admin]) == 0
    printed = capsys.readouterr().out
    for shown in ("0a1b", "2/2", "2.0 MiB", "7", "1.50 s", "never", "You are a ship"):
        assert shown in printed
    assert "decode-0: pins keep 2 of 64 pages (2.0 MiB); at most 16" in printed
    assert main(["pin", "list", "--json", "--hints", *admin]) == 0
    assert service.hints_asked == [False, True]
    values = json.loads(capsys.readouterr().out)
    assert values["pins"][0] | {"hits": 7, "saved_s": 1.5, "state": "ready"} == values["pins"][0]
    assert values["workers"][0]["most_pages"] == 16


def test_what_a_prompt_begins_with_cannot_write_to_the_terminal(router, capsys) -> None:
    service, admin = router
    service.text = "You\x1b[2J are\r\n\u202ea ship"
    assert main(["pin", "list", *admin]) == 0
    printed = capsys.readouterr().out
    assert "You" in printed
    assert printed.replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("flags", "pin_id", "owner"), [(["0a1b"], "0a1b", ""), (["--owner", "ops"], "", "ops"), (["--hints"], "", "")]
)
def test_remove_is_by_id_by_owner_or_of_hints(router, capsys, flags: list[str], pin_id: str, owner: str) -> None:
    service, admin = router
    assert main(["pin", "remove", *flags, *admin]) == 0
    assert capsys.readouterr().out == "1 pin removed\n"
    assert (service.removed[0].pin_id, service.removed[0].owner) == (pin_id, owner)


MISTAKES = {
    "no prefix": (["add"], "one of the arguments --system --chat --text --text-file is required"),
    "two prefixes": (["add", "--text", "a", "--system", "b"], "not allowed with argument"),
    "an empty text": (["add", "--text", ""], "the text of the pin is empty"),
    "a file that is not there": (["add", "--text-file", "/nowhere/x"], "--text-file /nowhere/x: No such file"),
    "a folder": (["add", "--text-file", "/"], "--text-file /: Is a directory"),
    "bytes that are not text": (["add", "--text-file", "{folder}/bytes"], "it is not text"),
    "too much text": (["add", "--text-file", "{folder}/large"], "at most 921,600 can be pinned"),
    "no JSON": (["add", "--chat", "{folder}/bad.json"], "is not valid JSON"),
    "JSON too deep": (["add", "--chat", "{folder}/deep.json"], "is not valid JSON"),
    "no messages": (["add", "--chat", "{folder}/empty.json"], "must hold a list of messages"),
    "a number for messages": (["add", "--chat", "{folder}/number.json"], "must hold a list of messages"),
    "a message without content": (["add", "--chat", "{folder}/half.json"], "messages[0] must be an object with role"),
    "an empty owner": (["add", "--text", "a", "--owner", ""], "--owner must not be empty"),
    "no duration": (["add", "--text", "a", "--expires", "soon"], "--expires: not a duration: 'soon'"),
    "a duration without unit": (["add", "--text", "a", "--expires", "30"], "write for example 30s, 5m, 1.5h or 7d"),
    "a duration below 0": (["add", "--text", "a", "--expires=-5m"], "not a duration"),
    "no time at all": (["add", "--text", "a", "--expires", "0s"], "--expires must be more than 0s"),
    "no size": (["add", "--text", "a", "--max-bytes", "much"], "--max-bytes: not a size"),
    "a size of 0": (["add", "--text", "a", "--max-bytes", "0"], "--max-bytes must be at least 1 byte, got 0"),
    "a size beyond all": (["add", "--text", "a", "--max-bytes", "9" * 30], "less than 8 EiB"),
    "no worker": (["add", "--text", "a", "--workers", ""], "a name is empty"),
    "an empty name": (["add", "--text", "a", "--workers", "decode-0,"], "a name is empty"),
    "zero workers": (["add", "--text", "a", "--workers", "0"], "from 1 to 1024"),
    "too many workers": (["add", "--text", "a", "--workers", "99999"], "from 1 to 1024"),
    "more workers than a number has digits": (["add", "--text", "a", "--workers", "9" * 5000], "from 1 to 1024"),
    **{
        f"bytes for {flag}": (["add", "--text", "a", flag, "\udcff"], f"{flag}: it is not text")
        for flag in ("--text", "--owner", "--tenant", "--cache-salt", "--workers")
    },
    "bytes for a system prompt": (["add", "--system", "\udcff"], "--system: it is not text"),
    "half a character in JSON": (["add", "--chat", "{folder}/half-character.json"], "messages[0]: it is not text"),
    "bytes for an id": (["remove", "\udcff"], "ID: it is not text"),
    "bytes for an owner": (["remove", "--owner", "\udcff"], "--owner: it is not text"),
    "no wait": (["add", "--text", "a", "--wait", "long"], "--wait: not a duration"),
    "nothing to remove": (["remove"], "name one pin by its ID, or an --owner, or --hints"),
    "two things to remove": (["remove", "0a", "--hints"], "name one pin by its ID"),
    "an empty id": (["remove", ""], "is empty"),
    "no such action": (["keep"], "invalid choice"),
    "an address that is none": (["list", "--admin", "there"], "--admin must be HOST:PORT"),
    "nobody there": (["list", *NOWHERE], "127.0.0.1:1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_one_line_that_names_it(mistake: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_text("x" * (1 << 20))
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "number.json").write_text('{"messages": 5}')
    (tmp_path / "half-character.json").write_text('[{"role": "system", "content": "\\ud83d"}]')
    (tmp_path / "half.json").write_text('[{"role": "system"}]')
    arguments, expected = MISTAKES[mistake]
    arguments = [argument.replace("{folder}", str(tmp_path)) for argument in arguments]
    if "--admin" not in arguments and arguments[0] != "keep":
        arguments += NOWHERE
    try:
        status = main(["pin", *arguments])
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert status == 2
    assert printed.out == ""
    assert expected in printed.err
    assert "Traceback" not in printed.err
    assert len([line for line in printed.err.splitlines() if line.startswith("twostroke")]) == 1
