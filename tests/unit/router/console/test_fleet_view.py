"""Sums over the fleet, rates between two snapshots, and lists that stay short."""

from __future__ import annotations

import json

from router.console.fleet_view import MOST_LISTS, MOST_WORKERS, FleetView
from router.fleet.worker import Worker
from router.metrics import RouterMetrics
from router.requests.request_handler import RequestHandler
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.unit.router.calls import calls_of
from tests.unit.router.conftest import ScriptedDispatcher
from tests.unit.router.console.helpers import OPERATOR, console, read
from twostroke.base.ids import Epoch, WorkerId
from twostroke.config import Role
from twostroke.rpc.v1 import control_pb2


def worker(name: str, role: Role = Role.DECODE, **load: object) -> Worker:
    made = Worker(WorkerId(name), role, "127.0.0.1:1", Epoch.begin(1), control_pb2.WORKER_STATE_SERVING)
    made.load = control_pb2.Load(**load)
    made.server = control_pb2.ServerInfo(kv_form="int8 from bfloat16")
    return made


def view_of(*workers: Worker) -> tuple[FleetView, RequestHandler]:
    dispatcher = ScriptedDispatcher(fleet=list(workers))
    handler = RequestHandler(dispatcher, InlinePreparer(ByteText()), RouterMetrics(), model="toy")
    return FleetView(handler), handler


def test_sums_are_by_role_and_state_of_pages() -> None:
    view, _ = view_of(
        worker("decode-0", running=2, waiting=1, pages_free=5, pages_active=3, queried_tokens=100, hit_tokens=40),
        worker("decode-1", running=1, pages_cached=7, queried_tokens=100, hit_tokens=10),
        worker("prefill-0", Role.PREFILL, queued_tokens=90, pages_pinned=2),
    )
    said = view.take_snapshot().listed("")
    prefill, decode = said["roles"]
    assert (decode["running"], decode["waiting"], decode["pages"]["free"], decode["pages"]["cached"]) == (3, 1, 5, 7)
    assert (prefill["queued_tokens"], prefill["pages"]["pinned"]) == (90, 2)
    assert said["hit_rate"] == 0.25
    assert said["tokens_per_s"] is None, "there is no snapshot before the first"
    assert [each["worker"] for each in said["workers"]] == ["decode-0", "decode-1", "prefill-0"]
    assert said["workers"][0]["form"] == "int8 from bfloat16"


def test_rates_are_of_the_time_since_the_last_snapshot() -> None:
    one = worker("decode-0", queried_tokens=100, hit_tokens=0)
    view, handler = view_of(one)
    view.take_snapshot()
    for _ in range(50):
        handler.metrics.sent_tokens.add(None)
    one.load = control_pb2.Load(queried_tokens=200, hit_tokens=75)
    said = view.take_snapshot().totals
    assert said["tokens_per_s"] > 0
    assert said["hit_rate_now"] == 0.75


def test_of_many_workers_those_with_the_longest_queues_are_listed_and_others_are_found() -> None:
    workers = [worker(f"decode-{number}", queued_s=float(number)) for number in range(500)]
    snapshot = view_of(*workers)[0].take_snapshot()
    said = snapshot.listed("")
    assert (said["worker_count"], len(said["workers"])) == (500, MOST_WORKERS)
    assert {each["worker"] for each in said["workers"]} == {f"decode-{number}" for number in range(436, 500)}
    assert [each["worker"] for each in snapshot.listed("decode-41")["workers"]][:2] == ["decode-41", "decode-410"]
    assert len(json.dumps(said)) < 64 << 10
    assert snapshot.answer("") is snapshot.answer(""), "the next viewer gets the same bytes"
    assert json.loads(snapshot.answer(""))["workers"] == said["workers"]
    assert all(snapshot.answer(f"decode-{number}") for number in range(2 * MOST_LISTS))


def test_a_snapshot_takes_no_longer_where_workers_have_measured_many_links() -> None:
    """Each of 500 workers may report a rate for each of the others."""

    def calls(links: int) -> int:
        rates = [control_pb2.LinkRate(worker_id=f"prefill-{number}", bytes_per_s=1e9) for number in range(links)]
        view = view_of(*(worker(f"decode-{number}", links=rates) for number in range(50)))[0]
        return calls_of(lambda: view.take_snapshot().listed(""))

    assert calls(200) <= 1.05 * calls(0)


async def test_all_viewers_of_one_second_share_one_snapshot() -> None:
    class Counting(ScriptedDispatcher):
        looks = 0

        def workers(self) -> list[Worker]:
            Counting.looks += 1
            return super().workers()

    async with console() as frontend:
        frontend.dispatcher.__class__ = Counting
        assert Counting.looks == 0, "nobody looks"
        for _ in range(20):
            await read(frontend, "fleet")
        assert Counting.looks < 20
        assert (await frontend.http.get("/console/api/fleet?find=x", headers=OPERATOR)).json()["workers"] == []
