"""Lists of requests, and one request with its waterfall, as the recorder remembers them."""

from __future__ import annotations

from router.console.request_list import slowest_of
from tests.unit.router.console.helpers import OPERATOR, console, read
from twostroke.tracing.recorder import KEPT_S, MOST_PER_PERIOD, MOST_REQUESTS, PERIOD_S, Recorder, SlowestRequests


async def test_requests_are_listed_the_latest_first_and_opened_by_their_ids() -> None:
    async with console() as frontend:
        for name in ("first", "second"):
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
            answer = await frontend.http.post("/v1/chat/completions", json=body, headers={"x-request-id": name})
            assert answer.status_code == 200
        listed = (await read(frontend, "requests", order="latest"))["requests"]
        assert [line["request"] for line in listed] == ["second", "first"]
        assert listed[0]["status"] == "ok"
        assert listed[0]["prompt_tokens"] > 5
        assert listed[0]["duration_s"] > 0
        slow = (await read(frontend, "requests", order="slowest"))["requests"]
        assert {line["request"] for line in slow} == {"first", "second"}
        assert slow[0]["duration_s"] >= slow[1]["duration_s"]
        for name in ("first", "chatcmpl-first", listed[1]["stream"]):
            known = await read(frontend, "request", id=name)
            assert known["stream"] == listed[1]["stream"]
            assert [line["name"] for line in known["lines"]] == ["request", "prepare"]
            assert not known["is_open"]


async def test_what_nobody_knows_is_said() -> None:
    async with console() as frontend:
        answer = await frontend.http.get("/console/api/request", params={"id": "<b>no</b>"}, headers=OPERATOR)
        assert answer.status_code == 404
        assert "know no request '<b>no</b>'" in answer.json()["error"]["message"]


def recorded(recorder: Recorder, name: str, seconds: float) -> None:
    root = recorder.root("request", name, "")
    root.begin("prepare").end()
    root.end(at_s=root.start_s + seconds)


def test_a_slow_request_is_known_when_a_thousand_have_come_since() -> None:
    recorder = Recorder("router-0")
    recorded(recorder, "slow~0123456789abcdef", 5.0)
    for number in range(MOST_REQUESTS + 1):
        recorded(recorder, f"fast-{number}~0123456789abcdef", 0.001)
    assert slowest_of(recorder.slowest())[0]["request"] == "slow"
    kept = recorder.find("slow")
    assert kept is not None
    assert [span.name for span in kept.spans] == ["prepare", "request"]


def test_the_slowest_of_each_period_are_kept_for_a_minute() -> None:
    kept = SlowestRequests()
    for number in range(1000):
        kept.ended(f"stream-{number}", (), float(number % 100), number / 1000)
    names = {stream for stream, _ in kept.of_the_last_minute(1.0)}
    assert len(names) == MOST_PER_PERIOD
    assert all(int(name.partition("-")[2]) % 100 >= 98 for name in names)
    for second in range(1, 200):
        kept.ended(f"later-{second}", (), 1.0, float(second))
    assert not names & {stream for stream, _ in kept.of_the_last_minute(199.0)}
    later = {stream for stream, _ in kept.of_the_last_minute(199.0)}
    assert {f"later-{second}" for second in range(199 - int(KEPT_S) + int(PERIOD_S), 199)} <= later
    assert KEPT_S / PERIOD_S * MOST_PER_PERIOD < 250, "a bounded number of requests"
