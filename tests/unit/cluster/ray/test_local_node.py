"""What a local cluster's raylet is told of the agents that nobody asks."""

from __future__ import annotations

import subprocess
import sys

from cluster.ray import idle_agent
from cluster.ray.local_node import with_idle_agents


def test_a_raylet_gets_idle_agents_and_nowhere_to_find_them() -> None:
    worker = "python worker.py --metrics-agent-port=0 --runtime-env-agent-port=0"
    before = [
        "raylet",
        "--metrics-agent-port=0",
        "--metrics_export_port=0",
        "--runtime_env_agent_port=0",
        "--node_manager_port=0",
        f"--python_worker_command={worker}",
        "--dashboard_agent_command=python agent.py --grpc-port=0",
        "--runtime_env_agent_command=python main.py",
    ]
    idle = subprocess.list2cmdline([sys.executable, "-I", "-S", idle_agent.__file__])
    assert with_idle_agents(before) == [
        "raylet",
        "--metrics-agent-port=1",
        "--metrics_export_port=1",
        "--runtime_env_agent_port=1",
        "--node_manager_port=0",
        f"--python_worker_command={worker}",
        f"--dashboard_agent_command={idle}",
        f"--runtime_env_agent_command={idle}",
        "--dashboard_agent_listen_port=1",
    ]


def test_an_idle_agent_is_nobody_else_s_child() -> None:
    ended = subprocess.run(
        [sys.executable, "-I", "-S", idle_agent.__file__], capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert "raylet" in ended.stderr
