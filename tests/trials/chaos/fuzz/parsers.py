"""The parsers behind the ports, each driven by nothing but bytes: what a stranger, a peer or a client may send."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from unittest.mock import patch

import numpy as np
from google.protobuf.message import DecodeError, Message

from router.endpoints.app import build_http_app
from router.metrics import RouterMetrics
from router.preparation.prepare import prepare
from router.requests.request_handler import RequestHandler
from router.requests.resume import SentProgress, StreamPoint
from router.requests.work import Work
from router.text.output.parsing import OutputFormats
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.trials.chaos.fuzz.console import CONSOLE
from tests.trials.chaos.fuzz.grammars import GRAMMARS
from tests.trials.chaos.fuzz.kserve import KSERVE
from tests.trials.chaos.fuzz.mutate import (
    frame,
    mutate_bytes,
    mutate_frames,
    mutate_json,
    mutate_message,
    mutate_msgpack,
)
from tests.trials.chaos.fuzz.target import Target, Try
from tests.trials.chaos.fuzz.wire import Wire
from tests.trials.chaos.injection.plan import Fault
from tests.unit.router.conftest import FACTS, ScriptedDispatcher
from tests.unit.router.dialects.anthropic.claude_code import CLAUDE_CODE, HEADERS
from twostroke.base.credentials import prove
from twostroke.base.errors import ServeError
from twostroke.base.ids import Epoch, PageId, RequestId
from twostroke.config.output import OutputConfig
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory, PoolLocation
from twostroke.request import Attempt, GenerateRequest, SampledToken, SamplingParams
from twostroke.rpc import convert, events
from twostroke.rpc.v1 import control_pb2, worker_pb2
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint
from twostroke.transfer.network.nixl import NixlConnection, serve_writes
from twostroke.transfer.network.nixl_agent import Agent, RemotePages
from twostroke.transfer.network.tcp import TcpConnection, serve_pages
from twostroke.transfer.pulls import PullTally, check_copies
from twostroke.transfer.sockets.frames import Deadline
from twostroke.transfer.sockets.handshake import PROTOCOL, ReaderValidator, introduce, reader_frame
from twostroke.transfer.sockets.tls import PLAIN

PAGES, PAGE_BYTES = 4, 64
LAYOUT = PoolLayout.of(PAGES, PAGE_BYTES)
RESUMED = "r-1~0123456789abcdef:0:3"
"""A resume token."""
OWNER = Identity("owner", Epoch(1, 7), "fingerprint", "secret")
READER = Identity("reader", Epoch(1, 8), "fingerprint", "secret")
ENDPOINT = PageEndpoint("tcp", "127.0.0.1:9", "boot/1", OWNER.epoch, "fingerprint", LAYOUT)
CONTENT = 0xEE
"""Value of every byte of the owner's pages: no welcome or refusal has a page full of it."""
NONCE = bytes(16)
_SHOWN = reader_frame(READER, OWNER.epoch, NONCE, NONCE)
_READERS_PROOF = _SHOWN[-1]
HANDSHAKE = frame(_SHOWN)
GREETING = frame([PROTOCOL, NONCE])
_SAID = ["owner", str(OWNER.epoch), "fingerprint", PAGES, PAGE_BYTES]
_PROOF = prove("secret", "pages owner", NONCE, NONCE, *map(str, _SAID))
WELCOME = GREETING + frame(["welcome", _PROOF, *_SAID])
IDS, COUNTS = np.array([2, 0], "<u4").tobytes(), np.array([0, 0], "<u8").tobytes()
HARMLESS = (ServeError, EOFError, OSError)
"""What ends a connection, and nothing else."""


def _same_nonces() -> Any:
    """Both sides draw NONCE, so that what follows a handshake is reached."""
    return patch("twostroke.transfer.sockets.handshake.draw_nonce", lambda: NONCE)


class Untouched:
    """Pages that nobody may change."""

    def __init__(self) -> None:
        self.memory = PageMemory(PAGES, PAGE_BYTES)
        self.memory.data[:] = CONTENT
        self.memory.generations[3] = 5

    def check(self) -> None:
        assert (self.memory.data == CONTENT).all()
        assert self.memory.generations.tolist() == [0, 0, 0, 5]


class NoAgent:
    """Stands in for NIXL's: notes what it is asked to write."""

    def __init__(self) -> None:
        self.open = 0

    def add(self, metadata: bytes, place: PoolLocation, layout: PoolLayout) -> RemotePages:
        assert isinstance(metadata, bytes)
        assert 0 <= place.address < 1 << 64
        self.open += 1
        return RemotePages("agent", layout.pages)

    def remove(self, remote: RemotePages) -> None:
        self.open -= 1

    def write(self, pages: Any, remote: RemotePages, remote_pages: Any, deadline: Any, is_wanted: Any) -> None:
        assert pages.max() < PAGES
        assert remote_pages.max() < remote.handle


@contextlib.contextmanager
def tcp_owner() -> Iterator[Try]:
    pages = Untouched()

    def attempt(data: bytes) -> None:
        wire = Wire(data)
        with contextlib.suppress(*HARMLESS), _same_nonces():
            ReaderValidator(OWNER, LAYOUT).admit(wire.sock, Deadline.after(9.0))
            serve_pages(wire.sock, pages.memory)
        pages.check()
        assert bytes([CONTENT]) * PAGE_BYTES not in wire.sent or _READERS_PROOF in data, "pages for somebody unknown"

    yield attempt
    pages.memory.close()


@contextlib.contextmanager
def nixl_owner() -> Iterator[Try]:
    pages = Untouched()

    def attempt(data: bytes) -> None:
        agent = NoAgent()
        with contextlib.suppress(*HARMLESS), _same_nonces():
            wire = Wire(data)
            ReaderValidator(OWNER, LAYOUT).admit(wire.sock, Deadline.after(9.0))
            serve_writes(wire.sock, pages.memory, cast(Agent, agent))
        pages.check()
        assert not agent.open

    yield attempt
    pages.memory.close()


@contextlib.contextmanager
def page_reader() -> Iterator[Try]:
    """Owners may be anybody, too: what they answer goes into the wanted pages or nowhere."""
    memory = PageMemory(PAGES, PAGE_BYTES)
    tcp, nixl = TcpConnection(ENDPOINT, READER, memory, PLAIN), NixlConnection(ENDPOINT, READER, memory, PLAIN)
    copies = (PageCopy(PageId(2), PageId(1), 0), PageCopy(PageId(0), PageId(3), 0))

    def attempt(data: bytes) -> None:
        memory.data[:] = 0
        connection = tcp if not data or data[0] % 2 == 0 else nixl
        wire = Wire(data[1:])
        with contextlib.suppress(*HARMLESS), _same_nonces():
            introduce(wire.sock, READER, ENDPOINT, Deadline.after(9))
            connection.copy_part(wire.sock, copies, Deadline.after(9), PullTally())
        assert not memory.data[[0, 2, PAGES]].any(), "bytes in a page that was not pulled into"

    yield attempt
    tcp.release()
    memory.close()


@contextlib.contextmanager
def endpoint() -> Iterator[Try]:
    memory = PageMemory(PAGES, PAGE_BYTES)

    def attempt(data: bytes) -> None:
        with contextlib.suppress(ServeError):
            read = PageEndpoint.unpack(data)
            assert PageEndpoint.unpack(read.pack()) == read
            assert all(type(text) is str for text in (read.transport, read.address, read.host_id, read.fingerprint))
            assert all(min(region.pages, region.page_bytes) >= 0 for region in read.layout.regions)
            check_copies([PageCopy(PageId(3), PageId(0), 0)], read, memory)

    yield attempt
    memory.close()


@contextlib.contextmanager
def words() -> Iterator[Try]:
    """Epochs and faults, as text."""

    def attempt(data: bytes) -> None:
        text = data.decode(errors="replace")
        with contextlib.suppress(ServeError):
            fault = Fault.parse(text)
            assert Fault.parse(str(fault)).point is fault.point
        with contextlib.suppress(ValueError):
            epoch = Epoch.parse(text)
            assert Epoch.parse(str(epoch)) == epoch
            assert epoch.incarnation >= 0

    yield attempt


@contextlib.contextmanager
def resume_token() -> Iterator[Try]:
    def attempt(data: bytes) -> None:
        for choices in (1, 4):
            with contextlib.suppress(ServeError):
                point = StreamPoint.after(data.decode(errors="replace"), choices, "resume_from")
                assert len(point.sent) == choices
                assert StreamPoint.after(SentProgress(point).ended(), choices, "resume_from").is_complete

    yield attempt


def message(kind: type[Message], convert: Callable[[Any], object]) -> Callable[[], Any]:
    @contextlib.contextmanager
    def opened() -> Iterator[Try]:
        def attempt(data: bytes) -> None:
            try:
                read = kind.FromString(data)
            except DecodeError:
                return
            with contextlib.suppress(ServeError):
                convert(read)

        yield attempt

    return opened


def open_and_back(read: worker_pb2.OpenRequest) -> None:
    attempt = convert.attempt_from_message(read)
    again = convert.attempt_to_message(attempt, fingerprint="f", worker_epoch="1.1", source=None)
    assert repr(convert.attempt_from_message(again)) == repr(attempt)


def batch_and_back(read: control_pb2.KvEventBatch) -> None:
    events.batch_to_message(read.worker_id, Epoch(1, 1), events.batch_from_message(read))  # type: ignore[arg-type]


HERMES = OutputConfig(tool_call_parser="hermes", reasoning_parser="think")
SAID = b'<think>a</think>b<tool_call>{"name": "look", "arguments": {"input": "c"}}</tool_call>'
"""An answer with all kinds of parts."""


def script(request: Any, choice: int) -> list[SampledToken]:
    """Every choice goes on to a worker as one message."""
    convert.request_to_message(request.of_choice(choice))
    return [SampledToken(byte) for byte in SAID]


@contextlib.contextmanager
def http() -> Iterator[Try]:
    """[method, path, headers, body]: the application, without a socket around it."""
    dispatcher = ScriptedDispatcher(script=script)
    handler = RequestHandler(dispatcher, InlinePreparer(ByteText(HERMES)), RouterMetrics(), model="toy")
    app = build_http_app(handler, max_body_bytes=1 << 16)

    async def call(method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> int:
        said = [{"type": "http.request", "body": body, "more_body": False}]
        statuses: list[int] = []
        ended = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if said:
                return said.pop()
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(answer: Any) -> None:
            statuses.extend([answer["status"]] if "status" in answer else [])

        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "http_version": "1.1", "scheme": "http", "client": ("c", 1), "server": ("s", 1),
        }  # fmt: skip
        await app(scope, receive, send)  # type: ignore[arg-type]
        ended.set()
        return statuses[0]

    with asyncio.Runner() as runner:

        def attempt(data: bytes) -> None:
            try:
                method, path, headers, body = json.loads(data)
                raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                sent = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                path, method = "/" + str(path).lstrip("/"), str(method)
                path.encode()
                method.encode("ascii")
            except (ValueError, TypeError, AttributeError, RecursionError):
                return
            dispatcher.requests.clear()
            dispatcher._aborted.clear()
            dispatcher.early.clear()
            status = runner.run(call(method, path, raw, sent))
            assert status != 500, "an internal error"
            assert not dispatcher.open_ids

        yield attempt


@contextlib.contextmanager
def messages() -> Iterator[Try]:
    """A body of Anthropic's API, to be answered and to be counted."""
    facts = dataclasses.replace(FACTS, max_model_len=1 << 13, pool_tokens=1 << 13)
    formats = OutputFormats("hermes", "think")

    def attempt(data: bytes) -> None:
        for kind in ("/v1/messages", "count_tokens"):
            outcome = prepare(Work(kind, data, "toy", facts, formats=formats), ByteText())
            assert outcome.error is not None or outcome.value

    yield attempt


RESPONSE: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "twostroke:c28="},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "agent_message", "author": "a", "recipient": "b", "content": "x"},
        {"type": "web_search_call"},
    ],
    "tools": [
        {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
        {"type": "namespace", "name": "n"},
    ],
    "tool_choice": "none", "parallel_tool_calls": True, "instructions": "be brief", "max_output_tokens": 4,
    "stream": True, "store": False, "top_logprobs": 2, "metadata": {"a": "b"}, "prompt_cache_key": "k",
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "reasoning": {"effort": "none", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "low"},
}  # fmt: skip


def _http_seeds() -> Sequence[bytes]:
    chat = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True,
            "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2, "seed": 5}  # fmt: skip
    text = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
            "min_p": 0.1, "stop": ["x"], "logit_bias": {"7": -3.5}, "stop_token_ids": [1], "presence_penalty": 1,
            "user": "u", "frequency_penalty": 1, "repetition_penalty": 1.2, "priority": 1, "timeout": 9.0,
            "min_tokens": 1}  # fmt: skip
    resumed = {"last-event-id": RESUMED, "x-request-timeout-s": "5", "x-tenant-id": "t", "x-request-id": "r-1"}
    return [
        json.dumps(row).encode()
        for row in (
            ["POST", "/v1/chat/completions", {"content-type": "application/json"}, chat],
            ["POST", "/v1/chat/completions", resumed, chat],
            ["POST", "/v1/completions", {"x-request-timeout-s": "5"}, text],
            ["POST", "/v1/completions", resumed, {"prompt": [1, 2, 3], "max_tokens": 5, "stream": True}],
            ["POST", "/v1/responses", {"content-type": "application/json"}, RESPONSE],
            ["POST", "/v1/responses", {}, RESPONSE | {"tool_choice": "auto", "max_output_tokens": None}],
            ["POST", "/v1/responses", resumed, RESPONSE | {"tool_choice": "auto", "stream": False}],
            ["GET", "/v1/responses/resp_1", {}, ""],
            ["POST", "/tokenize", {}, {"prompt": "abc", "return_token_strs": True}],
            ["POST", "/tokenize", {}, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}],
            ["POST", "/detokenize", {}, {"tokens": [1, 2, 3], "model": "toy"}],
            [
                "POST",
                "/v1/messages",
                HEADERS,
                {**CLAUDE_CODE, "system": "", "messages": [{"role": "user", "content": "hi"}]},
            ],
            ["POST", "/v1/responses/input_tokens", {}, {"input": "hi", "instructions": "be brief"}],
            ["POST", "/v1/messages/count_tokens", {}, {"messages": [{"role": "user", "content": "hi"}]}],
            ["GET", "/v1/models/toy", {}, ""],
            ["POST", "/v2/models/toy/versions/1/generate_stream", {}, {"text_input": "abc"}],
            ["GET", "/v2/models/toy/config", {}, ""],
            ["GET", "/metrics", {}, ""],
            ["POST", "/v1/chat/completions", {}, '{"messages": [{"role": "user", "content": "hi"}]}'],
        )
    ]


PROMPT = tuple(range(40))
SAMPLING = SamplingParams(seed=3, max_tokens=9, top_k=4, logit_bias=((3, 1.5),), logprobs=2, stop_token_ids=(7,))
OPEN = convert.attempt_to_message(
    Attempt(
        request=GenerateRequest(prompt=PROMPT, sampling=SAMPLING, deadline_s=2e9),
        request_id=RequestId("r#0"), number=1, emitted=(SampledToken(1), SampledToken(2)),
        block_hashes=tuple(block_hashes_of(PROMPT, 16)), router_id="router-0",
    ),
    fingerprint="fingerprint", worker_epoch="1.0000000000000007",
    source=worker_pb2.PageSource(worker_id="p", address="127.0.0.1:9", epoch="1.0000000000000008"),
)  # fmt: skip
BATCH = control_pb2.KvEventBatch(
    worker_id="w", epoch="1.0000000000000007", sequence=4, stored=bytes(32), removed=bytes(16), block_count=1,
    digest=bytes(16), further=[control_pb2.TierChange(tier=control_pb2.TIER_HOST, stored=bytes(16))],
)  # fmt: skip
TOKEN = worker_pb2.Token(id=5, logprob=-0.5, top=[worker_pb2.TopLogprob(id=5, logprob=-0.5)])
ERROR = worker_pb2.ErrorInfo(kind="Overloaded", message="m", field="f")

PARSERS = [
    Target("tcp-owner", [HANDSHAKE + frame([5.0, IDS, COUNTS]) * 2], mutate_frames, tcp_owner),
    Target(
        "nixl-owner",
        [HANDSHAKE + frame([b"metadata", 4096, 1, np.array([3], "<u4").tobytes()]) + frame([5.0, IDS, IDS, COUNTS])],
        mutate_frames,
        nixl_owner,
    ),
    Target(
        "page-reader",
        [
            b"\0" + WELCOME + b"\0" + bytes(2 * PAGE_BYTES) + b"\0",
            b"\0" + WELCOME + b"\1" + frame(["page 2 has generation 1"]),
            b"\1" + WELCOME + frame([""]),
            b"\1" + frame(["refused", "StaleEpoch", "another epoch"]),
        ],
        mutate_bytes,
        page_reader,
    ),
    Target("endpoint", [ENDPOINT.pack()], mutate_msgpack, endpoint),
    Target("words", [b"1.0000000000000007", b"pull.copied:stop:2:1.5", b"router.token:kill:1"], mutate_bytes, words),
    Target("resume-token", [RESUMED.encode(), b"r~0123456789abcdef:3:-,17e,3x2"], mutate_bytes, resume_token),
    Target("open-message", [OPEN.SerializeToString()], mutate_message(worker_pb2.OpenRequest),
           message(worker_pb2.OpenRequest, open_and_back)),
    Target("events-message", [BATCH.SerializeToString()], mutate_message(control_pb2.KvEventBatch),
           message(control_pb2.KvEventBatch, batch_and_back)),
    Target("token-message", [TOKEN.SerializeToString()], mutate_message(worker_pb2.Token),
           message(worker_pb2.Token, convert.token_from_message)),
    Target("error-message", [ERROR.SerializeToString()], mutate_message(worker_pb2.ErrorInfo),
           message(worker_pb2.ErrorInfo, convert.error_from_message)),
    Target("http", _http_seeds(), mutate_json, http),
    Target("messages", [json.dumps(CLAUDE_CODE).encode()], mutate_json, messages),
    *KSERVE,
    *GRAMMARS,
    *CONSOLE,
]  # fmt: skip
