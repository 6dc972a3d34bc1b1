"""Calls that mean another life of a worker, or another model, are refused; so is work that comes while it leaves."""

from __future__ import annotations

import pytest

from twostroke.base.errors import Draining, EngineLost, FingerprintMismatch, StaleEpoch
from twostroke.base.ids import Epoch
from twostroke.config import Role
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.request_validator import RequestValidator

EPOCH = Epoch(5, 7)


@pytest.fixture
def validator() -> RequestValidator:
    return RequestValidator("decode-0", EPOCH, "model", WorkerMetrics(Role.DECODE, 16))


@pytest.mark.parametrize("epoch", [Epoch(4, 7), Epoch(5, 6), Epoch(5, 8), Epoch(6, 7), Epoch(50, 7)])
def test_calls_for_an_earlier_or_a_later_life_are_refused(validator: RequestValidator, epoch: Epoch) -> None:
    with pytest.raises(StaleEpoch, match="the call is for"):
        validator.check("model", str(epoch))


def test_calls_for_this_life_or_for_any_are_taken(validator: RequestValidator) -> None:
    validator.check("model", str(EPOCH))
    validator.check("model", "")


@pytest.mark.parametrize("fingerprint", ["", "mode", "model2", "other"])
def test_callers_with_another_model_are_refused(validator: RequestValidator, fingerprint: str) -> None:
    with pytest.raises(FingerprintMismatch):
        validator.check(fingerprint, str(EPOCH))


def test_a_worker_that_leaves_lets_its_pages_be_read_and_takes_no_work(validator: RequestValidator) -> None:
    validator.is_draining = True
    validator.check("model", str(EPOCH), is_work=False)
    with pytest.raises(Draining):
        validator.check("model", str(EPOCH))
    validator.lost = EngineLost("gone")
    with pytest.raises(EngineLost):
        validator.check("model", str(EPOCH), is_work=False)
