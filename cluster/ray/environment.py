"""Sets the variables that Ray reads when it is first imported. This module comes before and imports no Ray."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CLIENT_KEYS = ("TWOSTROKE_API_KEY", "OPENAI_API_KEY")
"""Variables with an API key that the user's commands send. No process of a server reads them."""
SECRETS = frozenset(
    ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_REDIS_PASSWORD", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", *CLIENT_KEYS)
)
"""Variables that a router never reads: they hold or name a secret of Ray, of a model store, or of a client."""
_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_OUTLIVING = {
    # Ray ends a driver that lost its node where its parent is process 1, as under systemd, unless it watches another.
    "RAY_RAYLET_PID": str(os.getpid()),
    "RAY_gcs_rpc_server_reconnect_timeout_s": "1000000",
}


def for_local_cluster(token_file: Path) -> None:
    """Uses token authentication with a token of our own, and opens no port to other hosts.

    Processes get the token's file and not the token, so that no environment holds it. Nothing in the home folder is
    read or written.
    """
    _set(
        _ALWAYS
        | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token_file),
            # Off, Ray's processes listen on 127.0.0.1; on, they listen on all interfaces.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # Ray lowers its workers' priority by 15; ours are the purpose of this machine.
            "RAY_worker_niceness": "0",
            # With Ray's defaults (1000 and 1000) callers learn of an actor's death after one to two seconds.
            "RAY_timeout_ms_task_wait_for_death_info": "100",
            "RAY_core_worker_internal_heartbeat_ms": "200",
            # Nobody collects Ray's own metrics and events, for which each of its processes has timers.
            "RAY_enable_metrics_collection": "0",
            "RAY_task_events_report_interval_ms": "0",
            "RAY_event_stats": "0",
            # A node of a few actors has little to look at, and every look wakes a process.
            "RAY_memory_monitor_refresh_ms": "1000",
            "RAY_raylet_report_resources_period_milliseconds": "500",
            "RAY_raylet_check_gc_period_milliseconds": "1000",
            "RAY_object_manager_timer_freq_ms": "1000",
            "RAY_kill_idle_workers_interval_ms": "1000",
            "RAY_io_context_event_loop_lag_collection_interval_ms": "0",
        },
        without=("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_AUTH_TOKEN", "RAY_RUNTIME_ENV_HOOK", *CLIENT_KEYS),
    )


def for_joined_cluster(*, outlives_node: bool = False) -> None:
    """Sets the authentication that the environment asks for explicitly, because Ray would otherwise choose by itself.

    `outlives_node`: the process keeps running where Ray's node of this host ends, or its head is unreachable for long.
    """
    has_token = (
        any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
        or Path.home().joinpath(".ray/auth_token").exists()
    )
    mode = os.environ.get("RAY_AUTH_MODE") or ("token" if has_token else "disabled")
    if outlives_node:
        _set(_OUTLIVING, without=())
    # Tries, a second apart. A head that refuses us once would do so in the default 20, too.
    _set(_ALWAYS | {"RAY_AUTH_MODE": mode, "RAY_NUM_REDIS_GET_RETRIES": "3"}, without=("RAY_ADDRESS", "RAY_NAMESPACE"))


def without_secrets() -> dict[str, str]:
    """Returns the environment for a process that asks neither Ray nor a model store."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


def _set(values: dict[str, str], *, without: tuple[str, ...]) -> None:
    assert "ray" not in sys.modules, "Ray has read its environment already"
    for name in without:
        os.environ.pop(name, None)
    os.environ.update(values)
