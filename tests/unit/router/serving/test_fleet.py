"""The fleet view: who may get work, whose events count, what a router knows after everything went wrong."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.metrics import RouterMetrics
from router.serving.dispatcher import RouterCore
from tests.trials.chaos.injection import event_faults
from tests.trials.chaos.injection.injector import Injector
from tests.trials.chaos.injection.product import injected
from tests.unit.router.index_blocks import hashes_of
from twostroke.base.errors import ConfigError, Draining
from twostroke.base.ids import BlockHash
from twostroke.base.tokenizer_file import BYTES, FIELD, tokenizer_field
from twostroke.config import RouterConfig, RoutingConfig
from twostroke.kv_cache.block import block_hashes_of
from twostroke.kv_cache.events import TierChange
from twostroke.kv_cache.form import KvForm
from twostroke.kv_cache.tier import Tier
from twostroke.rpc.v1 import control_pb2, fleet_pb2

CHAIN = block_hashes_of(list(range(320)), 16)


def index_equals_truth(core: RouterCore, *workers) -> bool:
    return all(hashes_of(core._routing.index, worker.worker_id) == worker.log_names for worker in workers)


async def test_a_router_needs_a_fleet_address_and_a_known_policy():
    with pytest.raises(ConfigError, match="fleet"):
        RouterCore(RouterConfig(), RouterMetrics())
    with pytest.raises(ConfigError, match="round-robin"):
        RouterCore(RouterConfig(fleet_address="127.0.0.1:1", routing=RoutingConfig(policy="best")), RouterMetrics())


async def test_a_worker_whose_events_break_gets_no_new_work_until_it_is_back(fleet, ask, statuses, soon):
    first, second = await fleet.add("decode-0"), await fleet.add("decode-1")
    core = await fleet.core()
    first.may_subscribe.clear()
    first.break_events()
    await soon(lambda: statuses(core)["decode-0"] == "suspect")
    for number in range(6):
        await ask(core, prompt=range(number, 50)).task
    assert statuses(core)["decode-0"] == "suspect"
    assert first.opens == []
    assert len(second.opens) == 6
    first.may_subscribe.set()
    await soon(lambda: statuses(core)["decode-0"] == "serving")


async def test_a_decode_worker_has_its_token_stream_before_the_first_request(fleet, soon):
    worker = await fleet.add("decode-0")
    await fleet.add("prefill-0", "prefill")
    core = await fleet.core()
    await soon(lambda: set(worker.streams) == {core.router_id})


async def test_streams_of_a_suspect_worker_go_on(fleet, ask, statuses, soon):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)
    worker.may_subscribe.clear()
    worker.break_events()
    await soon(lambda: statuses(core)["decode-0"] == "suspect")
    worker.hold_at = None
    assert (await answer.task).is_right
    assert len(worker.opens) == 1


async def test_when_the_supervisor_says_dead_answers_move_without_waiting_for_the_link(fleet, ask):
    first, second = await fleet.add("decode-0", hold_at=8), await fleet.add("decode-1", hold_at=8)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(8)
    dead, other = (first, second) if first.opens else (second, first)
    other.hold_at = None
    await fleet.remove(dead.worker_id)
    assert (await answer.task).is_right
    assert len(other.opens[0].emitted) == 8


@pytest.mark.parametrize("knew_it", [False, True])
async def test_an_earlier_life_is_refused_and_counted(fleet, sampled, statuses, soon, knew_it):
    worker = await fleet.add("decode-0")
    core = await fleet.core() if knew_it else None
    zombie = worker.listed()
    await worker.kill()
    await worker.begin(2)
    fleet.show()
    core = core or await fleet.core()
    await soon(lambda: core._fleet.worker("decode-0").epoch == worker.epoch)
    await soon(lambda: statuses(core) == {"decode-0": "serving"})
    fleet.show(zombie)
    await soon(lambda: sampled(core, "stale_epochs_refused_total") == 1)
    assert core._fleet.worker("decode-0").epoch == worker.epoch
    assert statuses(core) == {"decode-0": "serving"}
    del fleet.entries["decode-0"]
    fleet.show(zombie)
    await soon(lambda: sampled(core, "stale_epochs_refused_total") == 2)
    assert statuses(core) == {}


async def test_a_later_life_replaces_the_earlier_one_and_its_blocks(fleet, statuses, soon):
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    for name in CHAIN:
        worker.log.stored(name)
    worker.publish()
    await soon(lambda: len(core._routing.index) == len(CHAIN))
    await worker.kill()
    await worker.begin(2)
    fleet.show()
    await soon(lambda: core._fleet.worker("decode-0").epoch == worker.epoch)
    assert len(core._routing.index) == 0
    await soon(lambda: statuses(core) == {"decode-0": "serving"})


async def test_a_process_that_is_another_life_than_listed_is_not_used(fleet, sampled, soon, statuses):
    worker = await fleet.add("decode-0")
    listed = fleet.entries["decode-0"]
    listed.epoch = "0.00000000000000aa"
    core = await fleet.core(ready=False)
    await soon(lambda: sampled(core, "stale_epochs_refused_total") >= 1)
    assert statuses(core) == {"decode-0": "joining"}
    listed.epoch = str(worker.epoch)
    fleet.show()
    await soon(lambda: core.is_ready)


async def test_a_worker_with_another_fingerprint_is_refused_loudly(fleet, ask, statuses, soon, caplog):
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    other = await fleet.add("decode-1", fingerprint="toy/2")
    await soon(lambda: statuses(core).get("decode-1") == "refused")
    refusal = next(record for record in caplog.records if record.levelname == "ERROR")
    assert "toy/1" in refusal.getMessage()
    assert "toy/2" in refusal.getMessage()
    for number in range(6):
        await ask(core, prompt=range(number, 50)).task
    assert other.opens == []
    assert len(worker.opens) == 6


async def test_a_worker_with_another_tokenizer_than_the_router_s_is_refused(fleet, statuses, soon, tmp_path):
    """A router that was started again after its model's folder was replaced would send tokens of another vocabulary."""
    (tmp_path / "tokenizer.json").write_text("old")
    old = f"model=a;{tokenizer_field(tmp_path)}"
    await fleet.add("decode-0", fingerprint=old)
    same = await fleet.core(model_dir=str(tmp_path))
    assert statuses(same) == {"decode-0": "serving"}
    (tmp_path / "tokenizer.json").write_text("new")
    other = await fleet.core(ready=False, model_dir=str(tmp_path))
    await soon(lambda: statuses(other) == {"decode-0": "refused"})
    assert old in (other._fleet.worker("decode-0").refusal or "")


async def test_a_paced_worker_takes_tokens_of_any_tokenizer(fleet, statuses, tmp_path):
    (tmp_path / "tokenizer.json").write_text("some")
    await fleet.add("decode-0", fingerprint=f"model=paced;{FIELD}{BYTES}")
    assert statuses(await fleet.core(model_dir=str(tmp_path))) == {"decode-0": "serving"}


async def test_workers_of_two_roles_may_differ_in_form_and_those_of_one_role_may_not(fleet, statuses, soon, caplog):
    forms = {
        "decode-0": KvForm("int8", "bfloat16"),
        "prefill-0": KvForm("bfloat16"),
        "decode-1": KvForm("int8"),
        "prefill-1": KvForm("float32"),
    }
    await fleet.add("decode-0", kv_form=forms["decode-0"])
    core = await fleet.core()
    await soon(lambda: statuses(core).get("decode-0") == "serving")
    assert core.facts.kv_form == forms["decode-0"]
    for name, status in (("prefill-0", "serving"), ("decode-1", "refused"), ("prefill-1", "refused")):
        await fleet.add(name, name.partition("-")[0], kv_form=forms[name])
        await soon(lambda name=name, status=status: statuses(core).get(name) == status)
    assert "its pages are int8, those of the fleet's decode workers are int8 from bfloat16" in caplog.text
    assert "its pages are float32, those of the fleet's prefill workers are bfloat16" in caplog.text


async def test_pages_that_nobody_converts_are_refused(fleet, statuses, soon, caplog):
    await fleet.add("decode-0", kv_form=KvForm("int8"))
    core = await fleet.core()
    await soon(lambda: statuses(core).get("decode-0") == "serving")
    await fleet.add("prefill-0", "prefill", kv_form=KvForm("bfloat16"))
    await soon(lambda: statuses(core).get("prefill-0") == "refused")
    assert "pages of decode workers are int8, and those of prefill workers bfloat16" in caplog.text


async def test_a_router_outlives_its_supervisor(fleet, ask, soon, statuses):
    await fleet.add("decode-0")
    core = await fleet.core()
    port = int(fleet.address.rpartition(":")[2])
    await fleet.stop()
    assert (await ask(core).task).is_right
    await fleet.start(port)
    await fleet.add("decode-1")
    await soon(lambda: statuses(core) == {"decode-0": "serving", "decode-1": "serving"})


async def test_lost_batches_are_replayed(fleet, sampled, soon):
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    worker.log.stored(CHAIN[0])
    worker.log.publish()
    worker.log.stored(CHAIN[1])
    worker.publish()
    await soon(lambda: index_equals_truth(core, worker) and len(core._routing.index) == 2)
    assert sampled(core, "event_gaps_total", worker="decode-0") >= 1
    assert sampled(core, "event_snapshots_total", worker="decode-0") == 1


async def test_an_index_that_diverged_is_replaced_by_a_snapshot(fleet, sampled, soon, statuses):
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    for name in CHAIN[:5]:
        worker.log.stored(name)
    worker.publish()
    await soon(lambda: len(core._routing.index) == 5)
    index = core._routing.index
    index._remove(index._workers["decode-0"], TierChange(Tier.DEVICE, (), (CHAIN[2],)))
    await soon(lambda: sampled(core, "event_divergences_total", worker="decode-0") == 1)
    await soon(lambda: index_equals_truth(core, worker))
    assert sampled(core, "event_snapshots_total", worker="decode-0") == 2
    assert statuses(core) == {"decode-0": "serving"}


@pytest.mark.parametrize("faults", ["", "drop:0.1,duplicate:0.1,reorder:0.1,seed:5"])
async def test_the_index_equals_the_workers_truth_after_a_stormy_hour(fleet, sampled, soon, faults, monkeypatch):
    monkeypatch.setenv(event_faults.ENVIRONMENT, faults)
    with injected(Injector()):
        await _play_a_stormy_hour(fleet, sampled, soon, repeats=bool(faults))


async def _play_a_stormy_hour(fleet, sampled, soon, *, repeats):
    workers = [await fleet.add(f"decode-{number}") for number in range(3)]
    core = await fleet.core()
    names = [BlockHash(bytes([number]) * 16) for number in range(200)]
    for turn in range(300):
        worker = workers[turn % 3]
        name = names[turn * 37 % 200]
        (worker.log.removed if name in worker.log_names else worker.log.stored)(name)
        if turn % 11 == 0:
            worker.log.publish()
        elif turn % 50 == 0:
            worker.break_events()
        else:
            worker.publish()
        if turn == 150:
            await worker.kill()
            await worker.begin(2)
            fleet.show()
        await asyncio.sleep(0)
    for worker in workers:
        worker.publish()
    await soon(lambda: index_equals_truth(core, *workers))
    assert sampled(core, "index_blocks") == len(core._routing.index) > 0
    assert sampled(core, "event_lag_seconds_count") > 0
    assert sampled(core, "index_holdings") == sum(len(worker.log_names) for worker in workers)
    if repeats:
        assert sampled(core, "event_repeats_total", worker="decode-0") > 0


async def test_a_subscriber_gets_a_snapshot_of_every_worker_and_then_what_changes(fleet, soon):
    first, second = await fleet.add("decode-0"), await fleet.add("prefill-0", "prefill")
    core = await fleet.core()
    first.log.stored(CHAIN[0])
    first.publish()
    await soon(lambda: len(core._routing.index) == 1)
    events = core.operations.subscribe(control_pb2.SubscribeKvEventsRequest())
    begun = [await anext(events), await anext(events)]
    assert {(batch.worker_id, batch.snapshot, batch.stored) for batch in begun} == {
        ("decode-0", True, CHAIN[0]),
        ("prefill-0", True, b""),
    }
    second.log.stored(CHAIN[1])
    async for batch in events:
        assert not batch.snapshot
        if batch.stored:
            break
    assert (batch.worker_id, batch.stored, batch.block_count) == ("prefill-0", CHAIN[1], 1)
    await events.aclose()


async def test_a_subscriber_that_names_the_next_sequence_gets_no_snapshot(fleet, soon):
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    following = core._routing.index.next_sequence("decode-0", worker.epoch)
    request = control_pb2.SubscribeKvEventsRequest(
        epoch=str(worker.epoch), start_sequence=following, worker_id="decode-0"
    )
    events = core.operations.subscribe(request)
    batch = await anext(events)
    assert not batch.snapshot
    assert batch.sequence == following
    await events.aclose()


async def test_a_subscriber_that_falls_far_behind_starts_again_from_snapshots(fleet, soon, monkeypatch):
    monkeypatch.setattr("router.routing.event_relay.MAX_BEHIND", 3)
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    events = core.operations.subscribe(control_pb2.SubscribeKvEventsRequest())
    assert (await anext(events)).snapshot
    worker.log.stored(CHAIN[0])
    start = worker.log.sequence
    await soon(lambda: core._routing.index.next_sequence("decode-0", worker.epoch) > start + 8)
    batches = [await anext(events) for _ in range(4)]
    snapshots = [batch for batch in batches if batch.snapshot]
    assert snapshots
    assert snapshots[-1].stored == CHAIN[0]
    await events.aclose()


async def test_loads_and_members_can_be_seen(fleet, soon):
    worker = await fleet.add("decode-0")
    await fleet.add("prefill-0", "prefill")
    core = await fleet.core()
    worker.load.running = 3
    await soon(lambda: core.operations.loads()[0].load.running == 3)
    assert {load.worker_id for load in core.operations.loads()} == {"decode-0", "prefill-0"}
    value = core._metrics.registry.get_sample_value
    assert value("twostroke_fleet_workers", {"role": "router", "worker_role": "decode", "state": "serving"}) == 1
    decode = {"role": "router", "worker_role": "decode", "worker": "decode-0"}
    assert value("twostroke_worker_running", decode) == 3
    assert value("twostroke_worker_pages", {**decode, "state": "free"}) == 500
    prefill = {"role": "router", "worker_role": "prefill", "worker": "prefill-0"}
    assert value("twostroke_worker_event_age_seconds", prefill) < 10


async def test_a_waiting_request_is_placed_as_soon_as_a_worker_joins(fleet, ask, soon):
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    await worker.kill()
    await fleet.remove("decode-0")
    await soon(lambda: not core.is_ready)
    answer = ask(core, deadline_s=time.time() + 30)
    await soon(lambda: "r" in core._open)
    await fleet.add("decode-1")
    assert (await answer.task).is_right


async def test_the_blocks_of_a_worker_that_left_are_forgotten(fleet, soon):
    first, second = await fleet.add("decode-0"), await fleet.add("decode-1")
    core = await fleet.core()
    for worker, count in ((first, 12), (second, 4)):
        for name in CHAIN[:count]:
            worker.log.stored(name)
        worker.publish()
    await soon(lambda: core._routing.index.leading_blocks(CHAIN) == {"decode-0": (12,), "decode-1": (4,)})
    await fleet.remove("decode-0")
    await soon(lambda: core._routing.index.leading_blocks(CHAIN) == {"decode-1": (4,)})
    assert len(core._routing.index) == 4


async def test_while_every_decode_worker_drains_a_request_fails_at_once(fleet, ask, statuses, soon):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)
    worker.load.state = control_pb2.WORKER_STATE_DRAINING
    await soon(lambda: statuses(core)["decode-0"] == "draining")
    with pytest.raises(Draining, match="every decode worker drains"):
        async with asyncio.timeout(60):
            await ask(core, request_id="new").task
    assert not core.is_ready
    assert core.knows_decode_worker, "clients of the others may go on waiting"
    worker.hold_at = None
    assert (await answer.task).is_right


async def test_while_one_worker_drains_and_another_starts_a_request_waits_for_that_one(fleet, ask, statuses, soon):
    draining = await fleet.add("decode-0")
    core = await fleet.core()
    fleet.entries["decode-1"] = starting_entry("decode-1")
    fleet.show()
    draining.load.state = control_pb2.WORKER_STATE_DRAINING
    await soon(lambda: statuses(core)["decode-0"] == "draining")
    answer = ask(core)
    await soon(lambda: "r" in core._open)
    await fleet.add("decode-1")
    assert (await answer.task).is_right
    assert draining.opens == []


async def test_a_supervisor_that_does_not_know_its_workers_yet_moves_no_answer(fleet, ask, statuses, soon, sampled):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)
    known = fleet.entries["decode-0"]
    fleet.entries["decode-0"] = starting_entry("decode-0")
    seen = await fleet.add("decode-1")
    await soon(lambda: statuses(core) == {"decode-0": "serving", "decode-1": "serving"})
    fleet.entries["decode-0"] = known
    fleet.show()
    worker.hold_at = None
    assert (await answer.task).is_right
    assert seen.opens == []
    assert sampled(core, "reopened_requests_total") == 0


async def test_a_subscriber_is_told_when_a_worker_leaves(fleet, soon):
    worker = await fleet.add("decode-0")
    core = await fleet.core()
    worker.log.stored(CHAIN[0])
    worker.publish()
    await soon(lambda: len(core._routing.index) == 1)
    events = core.operations.subscribe(control_pb2.SubscribeKvEventsRequest())
    assert (await anext(events)).stored == CHAIN[0]
    await fleet.remove("decode-0")
    async with asyncio.timeout(60):
        while not (last := await anext(events)).snapshot:
            pass
    assert (last.worker_id, last.epoch, last.stored, last.block_count) == ("decode-0", str(worker.epoch), b"", 0)
    await events.aclose()


async def test_what_can_be_promised_follows_the_workers_that_are_there(fleet, soon, statuses):
    await fleet.add("decode-0", pool_pages=300)
    await fleet.add("decode-1", pool_pages=200)
    core = await fleet.core()
    assert core.facts.pool_pages == 200
    await fleet.add("decode-2", pool_pages=100, fingerprint="toy/2")
    await soon(lambda: statuses(core).get("decode-2") == "refused")
    await fleet.add("decode-3", pool_pages=250)
    await soon(lambda: statuses(core).get("decode-3") == "serving")
    assert core.facts.pool_pages == 200
    await fleet.remove("decode-1")
    await soon(lambda: "decode-1" not in statuses(core))
    assert core.facts.pool_pages == 250


def starting_entry(worker_id: str) -> fleet_pb2.WorkerEntry:
    return fleet_pb2.WorkerEntry(worker_id=worker_id, role="decode", state=control_pb2.WORKER_STATE_STARTING)


async def test_a_worker_whose_weights_take_no_new_requests_is_heard_and_ends_what_it_has(fleet, ask, statuses):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    answer = ask(core)
    await answer.has(5)
    core._fleet._route_to("fingerprint of other weights")
    assert statuses(core) == {"decode-0": "other_weights"}
    assert (core._fleet.can_serve, core._fleet.knows_decode_worker) == (False, True)
    worker.hold_at = None
    assert (await answer.task).is_right
    assert len(worker.opens) == 1
