"""The router process: what it loads, what it prints, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import grpc.aio
import msgpack
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.addresses import bind_listener
from router.branches import BRANCHES
from router.metrics import RouterMetrics
from router.server import RouterServer
from tests.unit.router.conftest import ByteText, InlinePreparer, ScriptedDispatcher
from twostroke.base.credentials import prove
from twostroke.config import EndpointsConfig, ListenConfig, RouterConfig
from twostroke.rpc.proof import BEGIN
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc

HEAVY = ("torch", "ray", "transformers", "triton")


def config(**fields) -> RouterConfig:
    listening = {name: fields.pop(name) for name in list(fields) if name in ListenConfig.model_fields}
    listen = ListenConfig(**{"http_port": 0, "grpc_port": 0, **listening})
    return RouterConfig(**{"listen": listen, "fleet_address": "127.0.0.1:1", **fields})


@contextlib.contextmanager
def router_process(told: RouterConfig, *descriptors: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "router"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=descriptors,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(told.to_json())
        process.stdin.close()
        process.stdin = None
        yield process
    finally:
        process.kill()
        process.communicate()


def addresses_of(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


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
        with urllib.request.urlopen(f"http://{told['http']}/live", timeout=60) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://{told['http']}/ready", timeout=60)
        host, port = told["grpc"].split(":")
        socket.create_connection((host, int(port)), timeout=60).close()
        process.send_signal(number)
        assert process.wait(timeout=60) == 0


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
    command = [sys.executable, "-m", "router"]
    done = subprocess.run(command, input='{"http_prt": 1}', capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "RouterConfig has no setting http_prt" in done.stderr


def test_a_router_whose_core_fails_ends_with_a_status_that_says_so():
    script = """
import asyncio, sys
from router.fleet import fleet
from router.__main__ import main

async def fail(self, address):
    await asyncio.sleep(0.3)
    raise RuntimeError("the fleet view broke")

fleet.Fleet.run = fail
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=config().to_json(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["http"]
    assert "the fleet view broke" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: the router failed")


def test_it_listens_on_ipv6_and_names_addresses_that_can_be_used():
    with router_process(config(host="::1")) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        with urllib.request.urlopen(f"http://{told['http']}/live", timeout=60) as answer:
            assert answer.status == 200
        assert told["grpc"].startswith("[::1]:")
        socket.create_connection(("::1", int(told["grpc"].rpartition(":")[2])), timeout=60).close()


def live(connection: http.client.HTTPConnection) -> str | None:
    """Whether it is the connection's last answer."""
    connection.request("GET", "/live")
    answer = connection.getresponse()
    assert (answer.status, answer.read()) == (200, b"live\n")
    return answer.getheader("connection")


def test_a_life_that_another_one_replaces_refuses_nobody_and_ends():
    with bind_listener("127.0.0.1", 0) as listener:
        endpoint = listener.getsockname()
        told = {"http_port": endpoint[1], "http_fd": listener.fileno()}
        kept, idle = (http.client.HTTPConnection(*endpoint, timeout=60) for _ in range(2))
        with router_process(config(**told), listener.fileno()) as first:
            ports = {endpoint: int(address.rpartition(":")[2]) for endpoint, address in addresses_of(first).items()}
            told |= {"grpc_port": ports["grpc"], "endpoints": EndpointsConfig(admin_port=ports["admin"])}
            assert live(kept) is live(idle) is None
            with router_process(config(**told), listener.fileno()) as second:
                assert addresses_of(second)["grpc"] == f"127.0.0.1:{ports['grpc']}"
                first.send_signal(signal.SIGUSR1)
                while live(kept) is None:  # it has not heard of it yet
                    with contextlib.closing(http.client.HTTPConnection(*endpoint, timeout=60)) as another:
                        live(another)
                assert first.poll() is None, "somebody may still ask over the other connection"
                assert live(idle) == "close"
                assert first.wait(timeout=60) == 0
                assert live(kept) is None, "the next life has the door"
                kept.close()
                with grpc.insecure_channel(f"127.0.0.1:{ports['admin']}") as channel:
                    control = control_pb2_grpc.ControlStub(channel)
                    assert control.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=60).role == "router"


async def test_who_connects_over_grpc_between_two_lives_waits_for_the_next():
    with bind_listener("127.0.0.1", 0) as over_http, bind_listener("127.0.0.1", 0) as over_grpc:
        descriptors = over_http.fileno(), over_grpc.fileno()
        ports = {"http_port": over_http.getsockname()[1], "grpc_port": over_grpc.getsockname()[1]}
        told = config(**ports, http_fd=descriptors[0], grpc_fd=descriptors[1])
        with router_process(told, *descriptors) as first:
            address = addresses_of(first)["grpc"]
            children = psutil.Process(first.pid).children(recursive=True)
            first.kill()
            psutil.wait_procs(children, timeout=60)
        async with grpc.aio.insecure_channel(address) as channel:
            asked = asyncio.create_task(health(channel))
            await asyncio.wait([asked], timeout=1.0)
            assert not asked.done(), asked.exception()
            with router_process(told, *descriptors) as second:
                await asyncio.to_thread(addresses_of, second)
                assert await asked == health_pb2.HealthCheckResponse.NOT_SERVING, "it has no workers"


async def health(channel: grpc.aio.Channel) -> int:
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)).status


@pytest.mark.parametrize(("dialled", "is_taken"), [("203.0.113.9", True), ("127.0.0.1", True), ("203.0.113.8", False)])
async def test_other_routers_may_dial_it_where_it_says_that_they_reach_it(
    dialled: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.rpc.proof._host_address", lambda host: host)  # loopback would be taken anyhow
    told = config(fleet_address="", served_model_name="toy", cluster_token="secret", peer_host="203.0.113.9")
    dispatcher = ScriptedDispatcher()
    text = InlinePreparer(ByteText())
    server = RouterServer(
        told, dispatcher, text, RouterMetrics(), router_id="r", recorder=dispatcher.recorder, branches=BRANCHES
    )
    async with server.serving(), grpc.aio.insecure_channel(server.addresses.admin) as channel:
        nonce, address = bytes(16), f"{dialled}:{server.peer_address.rpartition(':')[2]}"
        opening = msgpack.packb([nonce, address, prove("secret", "caller", nonce, address)])
        code = await channel.unary_unary(BEGIN)(opening).code()
    assert code is (grpc.StatusCode.OK if is_taken else grpc.StatusCode.UNAUTHENTICATED)
