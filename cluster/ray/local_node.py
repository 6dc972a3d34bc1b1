"""A Ray node that starts only the processes which a local cluster uses: Ray's head (GCS) and the node's raylet.

`ray.init` also starts an autoscaler's monitor, a log monitor, a dashboard and two agents of the node. They serve nobody
here, cost a third of the start, and have no switch.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import ray._private.node
from ray._private import services

from cluster.ray import forked_worker, idle_agent

IDLE_AGENT = [sys.executable, "-I", "-S", idle_agent.__file__]
"""A raylet refuses to start without the commands of its two agents, and ends when one ends."""
NOWHERE = 1
"""Port of the agents, which nobody asks. Only root could listen there."""
_AGENT_PORTS = re.compile(r"^--(metrics-agent-|metrics_export_|runtime_env_agent_)port=\d+")
_WORKER_COMMAND = "--python_worker_command="
_AGENT_COMMANDS = re.compile(r"--(dashboard|runtime_env)_agent_command=")


class LocalNode(ray._private.node.Node):  # type: ignore[misc]  # Ray has no types
    """Starts GCS and raylet alone. Workers are forked by the fork server at `fork_socket`, where there is one."""

    def __init__(self, ray_params: Any, *, fork_socket: Path | None, **options: Any) -> None:
        self._fork_socket = fork_socket
        ray_params.no_monitor = True
        ray_params.include_log_monitor = False
        super().__init__(ray_params, **options)

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Start no dashboard."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        start = services.start_ray_process

        def start_changed(command: list[str], *arguments: Any, **options: Any) -> Any:
            command = without_agents(command)
            if self._fork_socket is not None:
                command = with_forked_workers(command, self._fork_socket)
            return start(command, *arguments, **options)

        with mock.patch.object(services, "start_ray_process", start_changed):
            super().start_raylet(*arguments, **options)


@contextmanager
def local_nodes(fork_socket: Path | None = None) -> Iterator[None]:
    """Let `ray.init` create a `LocalNode`."""
    with mock.patch.object(ray._private.node, "Node", functools.partial(LocalNode, fork_socket=fork_socket)):
        yield


def without_agents(raylet: list[str]) -> list[str]:
    """Return a raylet's command with idle agents."""
    command = [_AGENT_PORTS.sub(rf"--\1port={NOWHERE}", word) for word in raylet]
    return [
        *(
            found[0] + subprocess.list2cmdline(IDLE_AGENT) if (found := _AGENT_COMMANDS.match(word)) else word
            for word in command
        ),
        f"--dashboard_agent_listen_port={NOWHERE}",
    ]


def with_forked_workers(raylet: list[str], fork_socket: Path) -> list[str]:
    """Return a raylet's command that asks the fork server for each worker."""
    ask = [sys.executable, "-I", "-S", forked_worker.__file__, str(fork_socket)]
    asking = f"{_WORKER_COMMAND}{subprocess.list2cmdline(ask)} "
    return [
        asking + word.removeprefix(_WORKER_COMMAND) if word.startswith(_WORKER_COMMAND) else word for word in raylet
    ]
