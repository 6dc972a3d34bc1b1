"""What of Ray's own troubles reaches the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import ray

from cluster.ray import session as ray_session
from twostroke.base.errors import ConfigError


def test_a_ray_that_does_not_start_is_said_as_an_error_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**options: Any) -> NoReturn:
        raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ConfigError, match=r"Ray cannot be started .*: The current node timed out"):
        ray_session.start_local(Path("/tmp/nowhere"))
