"""Reloads and sleeping workers while something else fails, or while somebody wants something else."""

from __future__ import annotations

import pytest

from cluster.scaling.desired_state import Checkpoint
from tests.unit.cluster.fake_backend import until
from tests.unit.cluster.scaling.fleets import Backend
from tests.unit.cluster.supervisor.test_weights import checkpoints, serving
from twostroke.errors import ConfigError

OLD = Checkpoint()


async def test_workers_that_have_loaded_weights_that_are_given_up_afterwards_return_to_the_old_ones() -> None:
    backend = Backend()
    async with serving(backend, prefill=1) as supervisor:
        backend.workers["decode-0"].fails_to_load = ConfigError("tensor is missing", field="model")
        with pytest.raises(ConfigError, match="decode-0 cannot load the weights"):
            await supervisor.reload("", 1.0)
        backend.workers["decode-0"].fails_to_load = None
        await until(supervisor, "serving", "prefill-0", epoch="3.00")
        await until(supervisor, "serving", "decode-0")
        assert set(checkpoints(supervisor).values()) == {OLD}


async def test_a_reload_after_one_that_was_given_up_is_another_one_for_every_worker() -> None:
    backend = Backend()
    async with serving(backend, prefill=1) as supervisor:
        backend.workers["decode-0"].fails_to_load = ConfigError("tensor is missing", field="model")
        with pytest.raises(ConfigError):
            await supervisor.reload("", 1.0)
        backend.workers["decode-0"].fails_to_load = None
        await supervisor.reload("", 1.0)
        assert set(checkpoints(supervisor).values()) == {Checkpoint("", 2)}


async def test_routers_that_start_after_a_reload_was_given_up_are_told_the_weights_that_serve() -> None:
    backend = Backend()
    async with serving(backend, prefill=1) as supervisor:
        backend.workers["prefill-0"].fails_to_load = ConfigError("tensor is missing", field="model")
        with pytest.raises(ConfigError):
            await supervisor.reload("", 1.0)
        await until(supervisor, "serving", "decode-0")
        assert supervisor._routed_fingerprint() == "fingerprint"
