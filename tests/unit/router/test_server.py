"""The router process: what it loads, what it prints, how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from twostroke.config import RouterConfig, to_json

HEAVY = ("torch", "ray", "transformers", "triton")


def config(**fields) -> RouterConfig:
    return RouterConfig(**{"http_port": 0, "grpc_port": 0, "fleet_address": "127.0.0.1:1", **fields})


@contextmanager
def router_process(told: RouterConfig) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "router"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(to_json(told))
        process.stdin.close()
        process.stdin = None
        yield process
    finally:
        process.kill()
        process.communicate()


def test_no_module_of_the_router_loads_torch_ray_or_transformers():
    script = f"""
import importlib, pkgutil, sys, router
for module in pkgutil.walk_packages(router.__path__, "router."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import router.__main__
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_names_its_addresses_answers_and_ends_on_a_signal(number):
    with router_process(config()) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        with urllib.request.urlopen(f"http://{told['http']}/live", timeout=10) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://{told['http']}/ready", timeout=10)
        host, port = told["grpc"].split(":")
        socket.create_connection((host, int(port)), timeout=10).close()
        process.send_signal(number)
        assert process.wait(timeout=20) == 0


@pytest.mark.parametrize("field", ["http_port", "grpc_port"])
def test_a_port_in_use_is_said_and_nothing_is_served(field):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with router_process(config(**{field: port})) as process:
            out, error = process.communicate(timeout=30)
    assert process.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert out == ""


def test_a_config_that_is_none_is_said():
    done = subprocess.run(
        [sys.executable, "-m", "router", '{"http_prt": 1}'], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert "unknown keys ['http_prt']" in done.stderr


def test_a_router_whose_core_fails_ends_with_a_status_that_says_so():
    script = """
import asyncio, sys
from router import fleet
from router.__main__ import main

async def fail(self, address):
    await asyncio.sleep(0.3)
    raise RuntimeError("the fleet view broke")

fleet.Fleet.run = fail
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, to_json(config())], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["http"]
    assert "the fleet view broke" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: the router failed")


def test_it_listens_on_ipv6_and_names_addresses_that_can_be_used():
    with router_process(config(host="::1")) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        with urllib.request.urlopen(f"http://{told['http']}/live", timeout=10) as answer:
            assert answer.status == 200
        assert told["grpc"].startswith("[::1]:")
        socket.create_connection(("::1", int(told["grpc"].rpartition(":")[2])), timeout=10).close()
