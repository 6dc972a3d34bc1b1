"""Workers and supervisors that say nothing, although nothing of them breaks."""

from __future__ import annotations

import asyncio
import time

from router.fleet.liveness import LivenessCause
from twostroke.config import PatienceConfig

CAUSES = [cause.value for cause in LivenessCause]
IMPATIENT = PatienceConfig(heartbeat_s=0.1, suspect_after_s=0.3, dead_after_s=0.8)


async def test_a_worker_that_falls_silent_is_suspect_then_dead_and_back_when_it_is_heard(
    fleet, ask, statuses, soon, sampled, caplog
):
    """Its process is frozen or cut off: nothing of it breaks. It wakes up with the answer that went on elsewhere."""
    first, second = await fleet.add("decode-0", hold_at=8), await fleet.add("decode-1", hold_at=8)
    core = await fleet.core(patience=IMPATIENT)
    answer = ask(core)
    await answer.has(8)
    silent, other = (first, second) if first.opens else (second, first)
    silent._pulse.cancel()
    seen = []
    await soon(lambda: seen.append(statuses(core)[silent.worker_id]) or seen[-1] == "dead")
    assert "suspect" in seen
    assert core.is_ready
    other.hold_at = None
    assert (await answer.task).is_right
    assert silent.closed == []
    judged = sum(
        sampled(core, "worker_judgements_total", worker=silent.worker_id, liveness="dead", cause=c) for c in CAUSES
    )
    assert judged == 1
    assert "events_silent_s" in caplog.text
    silent._pulse = asyncio.create_task(silent._heartbeat())
    await soon(lambda: statuses(core)[silent.worker_id] == "serving")
    await soon(lambda: silent.closed == [("r#0", 0)])


async def test_a_router_that_was_late_itself_blames_no_worker(fleet, statuses, soon, sampled):
    """For twice the time after which they would be dead it hears nobody, because it does not listen."""
    worker = await fleet.add("decode-0")
    core = await fleet.core(patience=IMPATIENT)
    alive = sampled(core, "worker_judgements_total", worker="decode-0", liveness="alive", cause="heard")
    time.sleep(2 * IMPATIENT.dead_after_s)  # noqa: ASYNC251  # this is what is tested
    published = worker.log.sequence
    await soon(lambda: core._routing.index.next_sequence("decode-0", worker.epoch) > published + 3)
    assert sampled(core, "worker_judgements_total", worker="decode-0", liveness="suspect", cause="silence") == 0
    assert sampled(core, "worker_judgements_total", worker="decode-0", liveness="dead", cause="silence") == 0
    assert alive == 1
    assert sampled(core, "own_lateness_seconds_total") > IMPATIENT.dead_after_s


async def test_a_supervisor_that_falls_silent_is_asked_again_and_its_last_view_stands(
    fleet, ask, soon, statuses, monkeypatch
):
    monkeypatch.setattr("router.fleet.fleet.VIEW_SILENCE_S", 0.3)
    await fleet.add("decode-0")
    core = await fleet.core()
    deaf, fleet._watchers = fleet._watchers, {}
    await soon(lambda: len(fleet._watchers) == 1)
    assert statuses(core) == {"decode-0": "serving"}
    assert (await ask(core).task).is_right
    await fleet.add("decode-1")
    await soon(lambda: statuses(core) == {"decode-0": "serving", "decode-1": "serving"})
    fleet._watchers |= deaf
