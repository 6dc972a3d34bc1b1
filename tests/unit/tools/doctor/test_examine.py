"""A doctor's visit at a server that is made to fail in every way that shows from outside."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from zlib import crc32

import grpc
import pytest

from tools.cli import main
from tools.doctor import examine as examining
from tools.doctor.examine import seen_from
from twostroke.kv_cache.block import block_hashes_of, owner_salt
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

BLOCK = 16
PRINT = "model=m;block_size=16"


class Server(control_pb2_grpc.ControlServicer, inference_pb2_grpc.InferenceServicer):
    """A router with one decode worker: the words of a chat are its tokens."""

    def __init__(self) -> None:
        self.policy = "kv"
        self.worker_fingerprint = PRINT
        self.max_model_len = 2000
        self.varies_at: int | None = None
        self.forgets_events = False
        self.evicts = False
        self.ignores_cache = False
        self.fails_with: str | None = None
        self.sent: list[str] = []
        self.tokenized = 0
        self._held: dict[str, set[bytes]] = {}
        self._own_sequence = 1
        self._decisions = 0
        self._batches: list[control_pb2.KvEventBatch] = [self._batch(1, snapshot=True)]
        self._changed = threading.Condition()
        self.http = ""
        self.grpc = ""

    def page(self) -> str:
        """The metrics page of router and worker alike."""
        return (
            f"# TYPE twostroke_decisions counter\n"
            f'twostroke_decisions_total{{policy="{self.policy}",source="local"}} {self._decisions}\n'
            f"# TYPE twostroke_event_sequence gauge\ntwostroke_event_sequence {self._own_sequence}\n"
        )

    def tokens_of(self, chat: str) -> list[int]:
        tokens = [crc32(word.encode()) % 4000 for word in chat.split()]
        if self.varies_at is not None:
            self.tokenized += 1
            tokens[self.varies_at] = 4001 + self.tokenized
        return tokens

    def answer(self, chat: str, salt: str) -> tuple[int, int]:
        """(prompt tokens, cached tokens)"""
        tokens, self.tokenized = self.tokens_of(chat), self.tokenized - (self.varies_at is not None)
        names = block_hashes_of(tokens, BLOCK, owner_salt("", salt.encode()))
        known = self._held.setdefault("decode-0", set())
        cached = 0 if self.ignores_cache else next((at for at, n in enumerate(names) if n not in known), len(names))
        self.sent.append(salt)
        self._decisions += 1
        self._publish(stored=names)
        if self.evicts:
            self._publish(removed=names)
        else:
            known.update(names)
        return len(tokens), cached * BLOCK

    def _publish(self, stored: list[bytes] = (), removed: list[bytes] = ()) -> None:  # type: ignore[assignment]
        self._own_sequence += 1
        if self.forgets_events:
            self._held.clear()
            return
        with self._changed:
            self._batches.append(self._batch(self._own_sequence, stored=b"".join(stored), removed=b"".join(removed)))
            self._changed.notify_all()

    def _batch(self, sequence: int, **fields: object) -> control_pb2.KvEventBatch:
        return control_pb2.KvEventBatch(worker_id="decode-0", epoch="1.00", sequence=sequence, **fields)  # type: ignore[arg-type]

    def GetModelInfo(self, request, context):  # noqa: N802
        return control_pb2.ModelInfo(vocab_size=5000, block_size=BLOCK, max_model_len=self.max_model_len)

    def GetServerInfo(self, request, context):  # noqa: N802
        return control_pb2.ServerInfo(
            role="router", fingerprint=PRINT, metrics_address=self.http, grpc_address=self.grpc
        )

    def GetLoad(self, request, context):  # noqa: N802
        server = control_pb2.ServerInfo(role="decode", fingerprint=self.worker_fingerprint, metrics_address=self.http)
        load = control_pb2.Load(state=control_pb2.WORKER_STATE_SERVING)
        worker = control_pb2.WorkerLoad(worker_id="decode-0", load=load, server=server)
        return control_pb2.GetLoadResponse(workers=[worker])

    def SubscribeKvEvents(self, request, context):  # noqa: N802
        told = 0
        while context.is_active():
            with self._changed:
                if told == len(self._batches):
                    self._changed.wait(0.05)
                new, told = self._batches[told:], len(self._batches)
            yield from new

    def Tokenize(self, request, context):  # noqa: N802
        return inference_pb2.TokenizeResponse(token_ids=self.tokens_of(request.chat.messages[0].content))

    def Generate(self, request, context):  # noqa: N802
        if self.fails_with is not None:
            context.abort(grpc.StatusCode.UNAVAILABLE, self.fails_with)
        prompt, cached = self.answer(request.chat.messages[0].content, request.cache_salt)
        yield inference_pb2.GenerateResponse(token_ids=[1])
        usage = inference_pb2.Usage(prompt_tokens=prompt, completion_tokens=2, cached_tokens=cached)
        yield inference_pb2.GenerateResponse(finish_reason="length", usage=usage)


class Pages(BaseHTTPRequestHandler):
    server_double: Server

    def do_GET(self) -> None:
        self._reply(self.server_double.page().encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        chat = body["messages"][0]["content"]
        if self.path == "/tokenize":
            self._reply(json.dumps({"tokens": self.server_double.tokens_of(chat)}).encode())
            return
        prompt, cached = self.server_double.answer(chat, body.get("cache_salt", ""))
        usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}
        self._reply(json.dumps({"usage": usage}).encode())

    def _reply(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """A request is not an event."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(examining, "QUIET_S", 0.3)
    double = Server()
    with serving(double):
        yield double


@contextmanager
def serving(double: Server) -> Iterator[None]:
    pages = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Pages,), {"server_double": double}))
    double.http = f"127.0.0.1:{pages.server_port}"
    threading.Thread(target=pages.serve_forever, args=(0.02,), daemon=True).start()
    rpc = grpc.server(futures.ThreadPoolExecutor(8))
    control_pb2_grpc.add_ControlServicer_to_server(double, rpc)
    inference_pb2_grpc.add_InferenceServicer_to_server(double, rpc)
    double.grpc = f"127.0.0.1:{rpc.add_insecure_port('127.0.0.1:0')}"
    rpc.start()
    try:
        yield
    finally:
        rpc.stop(0).wait()
        pages.shutdown()
        pages.server_close()


def diagnose(server: Server, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict]:
    status = main(["doctor", "--admin", server.grpc, "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("protocol", ["gRPC", "HTTP"])
def test_a_chat_that_is_reused_is_fine(server: Server, capsys: pytest.CaptureFixture[str], protocol: str) -> None:
    flags = ("--url", f"http://{server.http}/v1") if protocol == "HTTP" else ()
    status, told = diagnose(server, capsys, *flags)
    assert (status, told["verdict"]["cause"]) == (0, "fine")
    assert len(told["facts"]["second"]["tokens"]) >= 6 * BLOCK
    assert server.sent == ["", ""]
    assert told["facts"]["policy"] == "kv"


FAULTS = {
    "template": {"varies_at": 40},
    "stale index": {"forgets_events": True},
    "eviction": {"evicts": True},
    "policy": {"ignores_cache": True, "policy": "random"},
    "block size": {"worker_fingerprint": "model=m;block_size=32"},
    "partial block": {"max_model_len": 14},
    "unhealthy worker": {"fails_with": "everybody is out"},
}


@pytest.mark.parametrize("cause", list(FAULTS))
def test_a_fault_that_shows_from_outside_is_named(
    server: Server, capsys: pytest.CaptureFixture[str], cause: str
) -> None:
    vars(server).update(FAULTS[cause])
    status, told = diagnose(server, capsys)
    assert (status, told["verdict"]["cause"]) == (1, cause), told["verdict"]


def test_two_salts_are_sent_and_named(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    status, told = diagnose(server, capsys, "--cache-salt", "a", "--cache-salt", "b")
    assert (status, told["verdict"]["cause"], server.sent) == (1, "salt", ["a", "b"])
    status, told = diagnose(server, capsys, "--cache-salt", "a")
    assert (status, server.sent[2:]) == (0, ["a", "a"])


def test_every_visit_brings_a_chat_that_nobody_has_sent_before(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = [diagnose(server, capsys)[1]["facts"] for _ in range(2)]
    assert [facts["first"]["cached_tokens"] for facts in reports] == [0, 0]


def test_for_people_it_is_a_few_lines_with_the_remedy(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.evicts = True
    assert main(["doctor", "--admin", server.grpc]) == 1
    printed = capsys.readouterr().out
    assert "eviction: decode-0 had" in printed
    assert "try: give workers more --kv-cache-memory" in printed


def test_a_server_that_is_not_there_and_flags_that_cannot_be_meant_end_with_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--admin", "127.0.0.1:1"]) == 2
    for elsewhere in (("--url", "http://127.0.0.1:1"), ("--grpc", "127.0.0.1:1")):
        assert main(["doctor", *elsewhere]) == 2
        assert "--admin HOST:PORT" in capsys.readouterr().err
    assert main(["doctor", "--admin", "127.0.0.1:1", *["--cache-salt", "x"] * 3]) == 2


def test_a_door_of_another_server_and_a_page_that_is_no_metrics_are_said(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "page", lambda: "<html>")
    assert diagnose(server, capsys)[1]["facts"]["policy"] is None
    monkeypatch.setattr(Pages, "do_POST", lambda self: self._reply(b'["other"]'))
    assert main(["doctor", "--admin", server.grpc, "--url", f"http://{server.http}"]) == 2
    assert "/tokenize: the answer has no tokens" in capsys.readouterr().err


def test_what_a_process_elsewhere_calls_here_is_there() -> None:
    assert seen_from("10.0.0.1:50051", "127.0.0.1:9000") == "10.0.0.1:9000"
    assert seen_from("10.0.0.1:50051", "0.0.0.0:8000") == "10.0.0.1:8000"
    assert seen_from("10.0.0.1:50051", "10.0.0.7:9000") == "10.0.0.7:9000"
