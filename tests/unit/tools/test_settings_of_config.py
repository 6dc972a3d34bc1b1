"""What tools ask as workers are asked is declared once, in `twostroke.config`."""

from __future__ import annotations

import pytest

from tools.bill.options import DraftFlags, MachineFlags, MemoryFlags, ModelFlags
from tools.simulate.fleet.shape import FleetShape
from tools.simulate.options import FleetFlags
from twostroke.config import CacheConfig, ModelConfig, PatienceConfig, RuntimeConfig, ScheduleConfig, Settings
from twostroke.config.settings import Setting, declared

CONFIGS = (ModelConfig, CacheConfig, ScheduleConfig, RuntimeConfig)
SAID = {"help", "default_text", "zero"}
"""What a tool may say in other words."""


@pytest.mark.parametrize("flags", [ModelFlags, MemoryFlags, MachineFlags, DraftFlags, FleetFlags])
def test_a_flag_of_a_worker_has_its_bounds_and_its_form_in_tools_too(flags: type[Settings]) -> None:
    of_workers = {name: setting for config in CONFIGS for name, setting in declared(config).items()}
    shared = declared(flags).keys() & of_workers.keys()
    assert shared
    for name in shared:
        assert _form_of(declared(flags)[name]) == _form_of(of_workers[name]), name


def test_a_simulated_fleet_is_told_no_more_than_a_live_one() -> None:
    shape = FleetShape()
    assert shape.max_num_seqs == ScheduleConfig().max_num_seqs
    assert shape.step_tokens == ScheduleConfig().step_tokens(on_gpu=True)
    assert shape.heartbeat_s == PatienceConfig().heartbeat_s
    assert shape.tiers.disk_write_bytes_per_s == 1e6 * CacheConfig().disk_write_mb_s


def _form_of(setting: Setting) -> dict[str, object]:
    return {name: getattr(setting, name) for name in setting.__dataclass_fields__ if name not in SAID}
