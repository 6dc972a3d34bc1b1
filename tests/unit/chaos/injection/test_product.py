"""The injection takes hold of the product as it is now, and lets go of it."""

from __future__ import annotations

import importlib

from tests.chaos.injection.injector import Injector
from tests.chaos.injection.product import PARTS, injected
from twostroke import fault_points
from twostroke.fault_points import Point


def test_all_that_is_wrapped_is_there_and_is_as_before_afterwards() -> None:
    """A part that was renamed would never be imported: its faults would not happen, and nobody would notice."""
    modules = {name: importlib.import_module(name) for name in PARTS}
    channels = modules["twostroke.rpc.channel"].PeerChannel
    before = channels.__init__
    with injected(Injector("here")) as injector:
        fault_points.reach(Point.WORKER_STEP)
        assert injector.reached == {"worker.step": 1}
        assert channels.__init__ is not before
    assert channels.__init__ is before
    assert not fault_points.reach(Point.WORKER_STEP)
    assert injector.reached == {"worker.step": 1}
