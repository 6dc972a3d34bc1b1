"""Contexts of traces, what a process keeps of requests, and an exporter whose collector is not there."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import prometheus_client
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from twostroke.base.errors import ConfigError
from twostroke.config import TracingConfig
from twostroke.tracing import otlp
from twostroke.tracing.recorder import MOST_KEPT_SPANS, MOST_REQUESTS, MOST_SPANS, Recorder, stream_of
from twostroke.tracing.span import MOST_CHUNKS, Chunks, Span, TraceContext

HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_a_header_is_read_as_it_was_written() -> None:
    context = TraceContext.parse(HEADER)
    assert context is not None
    assert context.header == HEADER
    child = context.child()
    assert (child.trace_id, child.is_sampled) == (context.trace_id, True)
    assert child.span_id != context.span_id


@pytest.mark.parametrize(
    "header",
    [
        "",
        "nonsense",
        "ff" + HEADER[2:],
        HEADER + "-00",
        HEADER.upper(),
        "00-" + "0" * 32 + HEADER[35:],
        HEADER[:36] + "0" * 16 + "-01",
    ],
)
def test_a_header_that_is_not_valid_counts_as_none(header: str) -> None:
    assert TraceContext.parse(header) is None


def test_a_later_version_of_the_header_is_read_as_far_as_it_is_known() -> None:
    assert TraceContext.parse("cc" + HEADER[2:] + "-what-comes-next") is not None


def test_every_router_samples_the_same_streams_and_as_many_as_asked() -> None:
    contexts = [TraceContext.begin(f"stream-{number}", 0.25) for number in range(2000)]
    again = [TraceContext.begin(f"stream-{number}", 0.25) for number in range(2000)]
    assert [(c.trace_id, c.is_sampled) for c in contexts] == [(c.trace_id, c.is_sampled) for c in again]
    assert 400 < sum(context.is_sampled for context in contexts) < 600
    assert not any(TraceContext.begin(f"{number}", 0.0).is_sampled for number in range(100))
    assert all(TraceContext.begin(f"{number}", 1.0).is_sampled for number in range(100))


def test_an_event_after_the_end_of_a_span_is_left_out() -> None:
    exported = Sink()
    span = Recorder("router-0", ratio=1.0, exporter=exported).root("request", "r", HEADER)
    span.event("queued")
    span.end()
    span.event("too late")
    span.late_event("too late", dict)
    assert [event.name for event in exported.spans[0].events] == ["queued"]


def test_a_client_decides_about_its_own_trace() -> None:
    exported = Sink()
    recorder = Recorder("router-0", ratio=1.0, exporter=exported)
    recorder.root("request", "r", HEADER[:-1] + "0").end()
    assert exported.spans == []
    recorder.root("request", "r", HEADER).end()
    assert [span.parent_id for span in exported.spans] == [0x00F067AA0BA902B7]


def test_all_parts_of_a_stream_are_found_by_its_clients_name_and_the_latest_of_that_name() -> None:
    recorder = Recorder("router-0")
    for stream in ("chat/1~0123456789abcdef", "chat/1~fedcba9876543210"):
        root = recorder.root("request", stream, "")
        recorder.begin("answer", f"{stream}/1#0", root.context).end()
        root.end()
    kept = recorder.find("chat/1")
    assert kept is not None
    assert kept.stream == "chat/1~fedcba9876543210"
    assert [span.name for span in kept.spans] == ["answer", "request"]
    assert recorder.find("chat") is None
    assert stream_of("chat/1~0123456789abcdef#12") == "chat/1~0123456789abcdef"
    assert stream_of("chat/1~0123456789abcdef.fedcba9876543210/3#12") == "chat/1~0123456789abcdef.fedcba9876543210"


@pytest.mark.parametrize("name", ["7f~0123456789abcdef", "7f~0123456789abcdef#2", "7f~0123456789abcdef/1#0", "7f"])
@pytest.mark.parametrize("kind", ["", "chatcmpl-", "cmpl-"])
def test_every_form_of_an_id_that_a_client_or_a_log_shows_names_its_stream(kind: str, name: str) -> None:
    recorder = Recorder("router-0")
    for stream in ("7f~0123456789abcdef", "another~fedcba9876543210"):
        recorder.root("request", stream, "").end(at_s=0.0)
    kept = recorder.find(kind + name)
    assert kept is not None
    assert kept.stream == "7f~0123456789abcdef"
    for number in range(MOST_REQUESTS):
        recorder.root("request", f"{number}~0123456789abcdef", "").end(at_s=time.time() + 1)
    assert recorder.find(kind + name) is None
    assert recorder.has_forgotten(kind + name)


def test_an_id_that_a_client_chose_is_taken_literally_first() -> None:
    recorder = Recorder("router-0")
    for stream in ("cmpl-1~0123456789abcdef", "1~fedcba9876543210"):
        recorder.root("request", stream, "").end()
    kept = recorder.find("cmpl-1")
    assert kept is not None
    assert kept.stream == "cmpl-1~0123456789abcdef"


def test_what_is_kept_is_bounded_and_what_was_forgotten_is_told_from_what_never_was() -> None:
    recorder = Recorder("router-0")
    for number in range(MOST_REQUESTS + 1):
        slower_s = time.time() + number  # the first one is not kept for being slow
        recorder.root("request", f"r{number}~0123456789abcdef", "").end(at_s=slower_s)
    assert recorder.find("r0") is None
    assert recorder.has_forgotten("r0")
    assert recorder.find("r1") is not None
    assert not recorder.has_forgotten("never")
    long = recorder.root("request", "long", "")
    for _ in range(MOST_SPANS + 10):
        long.begin("answer").end()
    assert len(recorder.find("long").spans) == MOST_SPANS


def test_a_span_without_a_parent_is_measured_and_leaves_nothing() -> None:
    exported, queues = Sink(), prometheus_client.Histogram("queues", "", registry=None)
    recorder = Recorder("decode-0", exporter=exported, lengths={"queue": queues})
    recorder.begin("attempt", "r", None).begin("queue").end()
    (queued,) = [sample.value for sample in queues.collect()[0].samples if sample.name == "queues_count"]
    assert (queued, exported.spans, recorder.find("r")) == (1, [], None)


def test_of_a_very_long_prompt_the_last_chunks_are_one_span() -> None:
    exported = Sink()
    root = Recorder("prefill-0", exporter=exported).root("prefill", "r", HEADER)
    chunks = Chunks(root)
    for number in range(MOST_CHUNKS + 3):
        chunks.ran(10 * number, 10 * number + 10, 0.001)
    chunks.end()
    assert len(exported.spans) == MOST_CHUNKS + 1
    assert exported.spans[-1].attributes == {"first_token": 10 * MOST_CHUNKS, "tokens": 30, "chunks": 3}
    assert chunks.tokens == 10 * (MOST_CHUNKS + 3)


def test_a_collector_that_is_not_there_loses_spans_that_are_all_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp, "MAX_PENDING", 50)
    monkeypatch.setattr(otlp, "EXPORT_S", 0.2)
    dropped: list[int] = []
    exporter = otlp.OtlpExporter("http://127.0.0.1:9", {"service.name": "test"}, dropped.append)
    recorder = Recorder("router-0", exporter=exporter)
    for number in range(200):
        recorder.root("request", f"r{number}", HEADER).end()
    recorder.close()
    while sum(dropped) < 200:  # a hang fails here
        time.sleep(0.02)
    assert sum(dropped) == 200


class Collector:
    """Stands in for OpenTelemetry's exporter."""

    def __init__(self) -> None:
        self.fails = True
        self.taken: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.fails:
            raise ValueError("a word of a client")
        self.taken += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Holds nothing."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    collector = Collector()
    monkeypatch.setattr(otlp, "_library", lambda endpoint, resource: (collector, Resource.get_empty()))
    monkeypatch.setattr(otlp, "LINGER_S", 0.0)
    return collector


def test_batches_that_cannot_be_sent_are_logged_once_until_one_is_sent(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    dropped: list[int] = []
    exporter = otlp.OtlpExporter("http://127.0.0.1:9", {}, dropped.append)
    root = Recorder("router-0", exporter=exporter).root("request", "r", HEADER)
    for number in range(1, 4):
        root.begin("answer").end()
        while len(dropped) < number:  # a hang fails here
            time.sleep(0.01)
    assert sum("spans not sent" in record.getMessage() for record in caplog.records) == 1
    assert "ValueError" in caplog.text
    assert "a word of a client" not in caplog.text
    collector.fails = False
    root.end()
    exporter.close()
    assert "spans sent again" in caplog.text


def test_the_parent_of_a_span_that_answers_another_process_is_remote(collector: Collector) -> None:
    collector.fails = False
    exporter = otlp.OtlpExporter("http://127.0.0.1:9", {}, lambda count: None)
    root = Recorder("router-0", exporter=exporter).root("request", "r", HEADER)
    root.begin("answer").end()
    root.end()
    exporter.close()
    parents = {span.name: span.parent for span in collector.taken}
    assert {name: parent is not None and parent.is_remote for name, parent in parents.items()} == {
        "answer": False,
        "request": True,
    }


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://host:1", "http://host", "http://:4317", "http://h:x"])
def test_an_endpoint_that_is_none_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint must be http://HOST:PORT"):
        TracingConfig(otlp_endpoint=endpoint)


class Sink:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def put(self, span: Span) -> None:
        self.spans.append(span)

    def close(self) -> None:
        """Nothing is pending."""


def test_spans_of_all_requests_are_bounded_however_many_each_has() -> None:
    recorder = Recorder("router-0")
    for number in range(MOST_KEPT_SPANS // MOST_SPANS + 20):
        context = TraceContext.begin(f"stream-{number}", 0.0)
        for _ in range(MOST_SPANS + 5):
            recorder.begin("answer", f"stream-{number}", context).end()
    kept = recorder.latest(MOST_REQUESTS)
    assert MOST_KEPT_SPANS - MOST_SPANS <= sum(len(each.spans) for each in kept) <= MOST_KEPT_SPANS
    assert recorder.has_forgotten("stream-0")
    assert recorder.find(f"stream-{MOST_KEPT_SPANS // MOST_SPANS + 19}") is not None


def test_what_explains_a_span_is_made_once_and_only_when_it_is_read() -> None:
    recorder, made = Recorder("router-0"), list[str]()

    def about(name: str) -> dict[str, str]:
        made.append(name)
        return {name: "known"}

    span = recorder.root("request", "r~0123456789abcdef", "")
    span.explain(lambda: about("policy"))
    span.late_event("candidate", lambda: about("decode"))
    span.set(attempt=1)
    span.end()
    kept = recorder.find("r")
    assert kept is not None
    assert made == []
    for _ in range(2):
        assert dict(kept.spans[0].attributes) == {"attempt": 1, "policy": "known"}
        assert dict(kept.spans[0].events[0].attributes) == {"decode": "known"}
    assert made == ["policy", "decode"]
