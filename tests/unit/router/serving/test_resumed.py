"""A client goes on with its stream at the router that serves it still, over a connection that the client has left."""

from __future__ import annotations

import pytest

from twostroke.base.errors import Cancelled
from twostroke.rpc.v1 import control_pb2


async def test_what_is_open_yet_is_taken_over_whole_and_the_earlier_connection_ends(fleet, ask):
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    earlier = ask(core)
    await earlier.has(5)
    resumed = ask(core, resumptions=1)
    await resumed.has(5)
    worker.hold_at = None
    assert (await resumed.task).is_right
    with pytest.raises(Cancelled):
        await earlier.task
    assert len(worker.opens) == 1
    assert not worker.closed


async def test_an_answer_that_moves_while_it_is_looked_for_is_taken_over_where_it_went(fleet, ask, soon):
    """Else it would be computed twice, and nobody would ever close the one that is nobody's."""
    first, second = await fleet.add("decode-0", hold_at=5), await fleet.add("decode-1", hold_at=5)
    core = await fleet.core()
    earlier = ask(core)
    await earlier.has(5)
    leaving, other = (first, second) if first.opens else (second, first)
    other.may_find.clear()
    resumed = ask(core, resumptions=1)
    await soon(lambda: leaving.finds and other.finds)
    leaving.load.state = control_pb2.WORKER_STATE_DRAINING
    await soon(lambda: leaving.closed)
    await soon(lambda: other.answers)
    other.may_find.set()
    other.hold_at = None
    assert (await resumed.task).is_right
    assert len(leaving.opens) == len(other.opens) == 1
    with pytest.raises(Cancelled):
        await earlier.task


async def test_a_router_that_was_left_and_opens_the_answer_once_more_does_not_take_it_from_the_one_that_goes_on(
    fleet, ask, soon
):
    worker = await fleet.add("decode-0", hold_at=5)
    left, core = await fleet.core(), await fleet.core()
    earlier = ask(left)
    await earlier.has(5)
    worker.may_find.clear()
    resumed = ask(core, resumptions=1)
    await soon(lambda: worker.finds)
    left._with.links.drop(left._fleet.worker("decode-0"), "this router only")
    await soon(lambda: len(worker.opens) == 2 and worker.closed)
    worker.may_find.set()
    worker.hold_at = None
    assert (await resumed.task).is_right
    earlier.task.cancel()


async def test_a_connection_that_was_left_cannot_end_a_choice_of_the_one_that_goes_on(fleet, ask):
    """It may still be at a token in which it finds a stop string, and the other one has not come to it yet."""
    worker = await fleet.add("decode-0", hold_at=5)
    core = await fleet.core()
    earlier = ask(core)
    await earlier.has(5)
    resumed = ask(core, resumptions=1)
    await resumed.has(5)
    core.finish_early(earlier.parent, 0)
    worker.hold_at = None
    assert (await resumed.task).is_right
    with pytest.raises(Cancelled):
        await earlier.task
