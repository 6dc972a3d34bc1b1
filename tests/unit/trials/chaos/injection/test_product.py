"""The injection takes hold of the product as it is now, and lets go of it."""

from __future__ import annotations

import importlib

import pytest

from tests.trials.chaos.injection.injector import Injector
from tests.trials.chaos.injection.plan import SURE_DRAFTS
from tests.trials.chaos.injection.product import PARTS, injected
from twostroke.base import fault_points
from twostroke.base.fault_points import Point
from twostroke.scheduler.constraints.model_drafting import model_lengths


def test_all_that_is_wrapped_is_there_and_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that was renamed would never be imported: its faults would not happen, and nobody would notice."""
    monkeypatch.setenv(SURE_DRAFTS, "1")
    modules = {name: importlib.import_module(name) for name in PARTS}
    channels = modules["twostroke.rpc.channel"].PeerChannel
    before = channels.__init__
    with injected(Injector("here")) as injector:
        fault_points.reach(Point.WORKER_STEP)
        assert injector.reached == {"worker.step": 1}
        assert channels.__init__ is not before
        assert modules["twostroke.worker.drafts.model_drafts"].model_lengths is not model_lengths
    assert modules["twostroke.worker.drafts.model_drafts"].model_lengths is model_lengths
    assert channels.__init__ is before
    assert not fault_points.reach(Point.WORKER_STEP)
    assert injector.reached == {"worker.step": 1}
