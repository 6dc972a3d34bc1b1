"""A Ray node that starts only the processes which a local cluster uses: Ray's head (GCS) and the node's raylet.

`ray.init` also starts an autoscaler's monitor, a log monitor, a dashboard and two agents of the node. They serve nobody
here and have no switch. With them, a start with a paced model takes 1.4 times the processor time and 1.6 times the
memory (docs/performance.md).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import ray._private.node
from ray._private import services

from cluster.ray import idle_agent

IDLE_AGENT = [sys.executable, "-I", "-S", idle_agent.__file__]
"""Command in place of each of two agents: a raylet refuses to start without them, and ends when one of them ends."""
NOWHERE = 1
"""Port of the agents. No process calls it. Only root could listen there."""
_AGENT_PORTS = re.compile(r"^--(metrics-agent-|metrics_export_|runtime_env_agent_)port=\d+")
_AGENT_COMMANDS = re.compile(r"--(dashboard|runtime_env)_agent_command=")


class LocalNode(ray._private.node.Node):  # type: ignore[misc]  # Ray has no types
    """Starts GCS and raylet alone."""

    def __init__(self, ray_params: Any, **options: Any) -> None:
        ray_params.no_monitor = True
        ray_params.include_log_monitor = False
        super().__init__(ray_params, **options)

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Starts no dashboard."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        start = services.start_ray_process

        def start_changed(command: list[str], *arguments: Any, **options: Any) -> Any:
            return start(with_idle_agents(command), *arguments, **options)

        with mock.patch.object(services, "start_ray_process", start_changed):
            super().start_raylet(*arguments, **options)


@contextmanager
def local_nodes() -> Iterator[None]:
    """Lets `ray.init` create a `LocalNode`."""
    with mock.patch.object(ray._private.node, "Node", LocalNode):
        yield


def with_idle_agents(raylet: list[str]) -> list[str]:
    """Returns a raylet's command that starts an idle process in place of each agent."""
    return [*map(_with_idle_agent, raylet), f"--dashboard_agent_listen_port={NOWHERE}"]


def _with_idle_agent(word: str) -> str:
    """Returns one word of the command with the agent's command or port in it replaced."""
    if command_of := _AGENT_COMMANDS.match(word):
        return command_of[0] + subprocess.list2cmdline(IDLE_AGENT)
    return _AGENT_PORTS.sub(rf"--\1port={NOWHERE}", word)
