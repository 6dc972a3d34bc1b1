"""`twostroke serve` as a user starts it, with real workers and router and a paced model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from cluster.clients.admin_access import RAY_TOKEN_FILE, TOKEN_FILE
from tests import metrics_page
from tests.cluster import shared_port
from tests.cluster.served import (
    CHECKOUT,
    PATIENCE_S,
    SMALL,
    Server,
    assert_all_ended,
    starting,
    wait_until,
)
from tests.deploy.documents import commands_in
from tests.process_table import environment_of, listening_ports, title_of
from tools.simulate.traces.formats import record_of
from tools.simulate.traces.trace import read_trace
from twostroke.observability.event_log import MOST_FILE_BYTES
from twostroke.observability.request_log import AnswerRecord, WorkerRecord
from twostroke.rpc.v1 import routing_pb2, routing_pb2_grpc

README = CHECKOUT / "README.md"
LOG = "requests.jsonl"
"""The name of the log in the user's working directory."""
USERS_KEY = "the-key-that-this-user-sends"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it serving."""
    flags = ("--routers", "2", "--request-log", LOG, "--flexible")
    with starting(tmp_path_factory.mktemp("shared"), *SMALL, *flags, TWOSTROKE_API_KEY=USERS_KEY) as started:
        started.until_printed("Ctrl-C ends it")
        yield started


def test_a_question_is_answered_over_http_and_grpc(server: Server) -> None:
    options = ["--max-tokens", "8", "--temperature", "0"]
    over_http = server.command("chat", "Why is the sky blue?", *options)
    over_grpc = server.command("chat", "--grpc", server.address("gRPC"), "Why is the sky blue?", *options)
    assert len(over_http.strip()) == 8
    assert over_http == over_grpc


def test_the_printed_commands_and_those_of_the_readme_can_be_pasted(server: Server) -> None:
    curl, grpc = re.findall(r"^(?:curl|\S*twostroke chat) .*$", server.printed, re.MULTILINE)
    readme = of_this(README.read_text(), server)
    told = [command.text for command in commands_in(readme, "README.md")]
    assert curl in told
    assert f".venv/bin/twostroke chat{grpc.partition('twostroke chat')[2]}" in told
    if shutil.which("curl"):
        done = subprocess.run(shlex.split(curl), capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.rstrip().endswith("data: [DONE]")
    assert server.command(*shlex.split(grpc)[1:], "--max-tokens", "3").strip()
    (stub,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    python = [sys.executable, "-c", stub]
    done = subprocess.run(python, capture_output=True, text=True, check=True, timeout=60, cwd=CHECKOUT)
    assert len(done.stdout) == 64


def of_this(text: str, server: Server) -> str:
    """With its addresses and model instead of the usual ones."""
    text = text.replace("127.0.0.1:8000", server.address("HTTP").removesuffix("/v1"))
    return text.replace("127.0.0.1:50051", server.address("gRPC")).replace("smollm2-135m", "tiny")


def test_how_many_workers_are_wanted_is_told(server: Server) -> None:
    assert server.command("scale").startswith("wanted: 1 prefill + 1 decode; ")


def test_a_worker_serves_in_the_role_that_it_is_given_until_it_is_given_another_one_though_it_is_killed(
    server: Server,
) -> None:
    def role_and_epoch() -> tuple[str, int]:
        workers = {each["worker_id"]: each for each in json.loads(server.command("status", "--json"))["workers"]}
        said = workers.get("prefill-0", {"role": "", "epoch": "0."})
        return said["role"], int(said["epoch"].partition(".")[0] or 0)

    begun, pid = role_and_epoch()[1], server.worker_pid("PrefillActor")
    server.command("role", "prefill-0", "decode")
    wait_until(lambda: role_and_epoch() == ("decode", begun + 1))
    assert server.worker_pid("PrefillActor") == pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: role_and_epoch() == ("decode", begun + 2))
    server.command("role", "prefill-0", "prefill")
    wait_until(lambda: role_and_epoch() == ("prefill", begun + 3))


def test_status_shows_every_worker_with_its_epoch_and_pages(server: Server) -> None:
    def status() -> dict[str, Any]:
        return dict(json.loads(server.command("status", "--json")))

    # The last test's pages are given back with the load report that follows it.
    wait_until(lambda: not any(worker["pages_active"] for worker in status()["workers"]))
    assert status()["model"] == "tiny"
    workers = {worker["worker_id"]: worker for worker in status()["workers"]}
    assert sorted(workers) == ["decode-0", "prefill-0"]
    for worker in workers.values():
        assert worker["state"] == "serving"
        assert re.fullmatch(r"\d+\.[0-9a-f]{16}", worker["epoch"])
        assert f'role="{worker["role"]}"' in metrics_page.scraped(worker["metrics_address"])
        assert worker["pages_free"] + worker["pages_cached"] == worker["pages_total"] > 0
    table = server.command("status", "--admin", server.address("admin"))
    assert all(worker["epoch"] in table for worker in workers.values())


def test_the_doctor_finds_a_healthy_server_fine_through_both_doors(server: Server) -> None:
    for endpoint in ([], ["--url", f"http://{server.address('HTTP')}"]):
        told = json.loads(server.command("doctor", "--json", *endpoint))
        assert told["verdict"]["cause"] == "fine"
        assert told["facts"]["second"]["cached_tokens"] >= 6 * 16
        assert told["facts"]["policy"] == "kv"
        workers = told["facts"]["workers"]
        assert max(worker["held_blocks"] for worker in workers) * 16 == told["facts"]["second"]["cached_tokens"]
        assert all(worker["own_sequence"] <= worker["index_sequence"] for worker in workers)


def test_the_doctor_names_the_salt_that_keeps_two_chats_apart(server: Server) -> None:
    done = server.run("doctor", "--cache-salt", "alice", "--cache-salt", "bob")
    assert done.returncode == 1, done.stderr
    assert "salt: cache_salt was 'alice' and then 'bob'" in done.stdout


def test_a_request_log_is_written_and_can_be_replayed(server: Server) -> None:
    path = server.out.parent / LOG

    def said() -> list[AnswerRecord | WorkerRecord]:
        return [record_of(line, LOG) for line in path.read_text().splitlines()]

    def answers() -> list[AnswerRecord]:
        return [record for record in said() if isinstance(record, AnswerRecord)]

    answered = len(answers())
    server.command("chat", "What is written down?", "--max-tokens", "7")
    wait_until(
        lambda: len(answers()) > answered and any(isinstance(each, WorkerRecord) for each in said()), path.read_text
    )
    row, answer = read_trace(path).rows[-1], answers()[-1]
    assert (row.output_tokens, row.input_tokens) == (7, answer.prompt_tokens)
    assert answer.ttft_s is not None
    assert answer.predicted_ttft_s is not None
    assert answer.forecast
    assert answer.price
    assert "written down" not in path.read_text()


def test_a_killed_decode_worker_comes_back_in_a_new_life(server: Server) -> None:
    before = server.epochs()
    os.kill(server.worker_pid("ray::DecodeActor"), signal.SIGKILL)
    server.until_printed("decode-0 died")
    wait_until(lambda: server.epochs().get("decode-0", "") not in ("", before["decode-0"]), lambda: server.printed)
    after = server.epochs()
    assert int(after["decode-0"].partition(".")[0]) > int(before["decode-0"].partition(".")[0])
    assert after["prefill-0"] == before["prefill-0"]
    assert server.command("chat", "Still there?", "--max-tokens", "3").strip()
    assert "raylet" not in server.printed


def routers(server: Server) -> list[dict[str, str]]:
    return list(json.loads(server.command("status", "--json"))["routers"])


def pid_of(server: Server, address: str) -> int:
    """Returns the process id of the router that listens there."""
    port = int(address.rpartition(":")[2])
    return next(
        process.pid
        for process in server.processes()
        if title_of(process).endswith("-m router") and port in listening_ports(process)
    )


def is_ready(http: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{http}/ready", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def hears_another(http: str) -> bool:
    try:
        return metrics_page.total(http, "twostroke_other_routers") == 1
    except OSError:
        return False  # not yet back


def assert_a_stranger_is_refused(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        watch = routing_pb2_grpc.RoutingStub(channel).WatchReservations(
            routing_pb2.WatchReservationsRequest(router_id="stranger"), timeout=PATIENCE_S
        )
        with pytest.raises(grpc.RpcError) as raised:
            next(watch)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]  # also a grpc.Call


def test_a_router_is_killed_under_load_and_only_what_was_open_there_notices(server: Server) -> None:
    first, second = routers(server)
    assert first["state"] == second["state"] == "serving"
    assert first["http"] == second["http"] == server.address("HTTP").removesuffix("/v1")
    assert first["grpc"] == second["grpc"] == server.address("gRPC")
    assert len({router[port] for router in (first, second) for port in ("address", "metrics")}) == 4
    wait_until(lambda: all(hears_another(router["metrics"]) for router in (first, second)))
    assert_a_stranger_is_refused(first["address"])

    asyncio.run(shared_port.lose_a_router(first, pid_of(server, first["address"]), server))

    server.until_printed("router-0 ended with status -9; it is started again")
    wait_until(lambda: all(is_ready(router["metrics"]) for router in (first, second)), lambda: server.printed)
    wait_until(lambda: all(hears_another(router["metrics"]) for router in (first, second)), lambda: server.printed)
    revived, same = routers(server)
    assert same == second
    assert revived["router_id"] != first["router_id"]
    assert revived == first | {"router_id": revived["router_id"]}


def supervisor_of(server: Server) -> int | None:
    return next((each.pid for each in server.processes() if "ray::SupervisorActor" in title_of(each)), None)


def reopened(server: Server) -> float:
    return sum(metrics_page.total(router["metrics"], "twostroke_reopened_requests_total") for router in routers(server))


def test_a_killed_supervisor_comes_back_and_keeps_watch(server: Server) -> None:
    before, moved = server.epochs(), reopened(server)
    supervisor = server.worker_pid("ray::SupervisorActor")
    os.kill(supervisor, signal.SIGKILL)
    server.until_printed("the supervisor died")
    chats_since = 0
    while chats_since < 2:  # until the new one has had time to find its workers, there is always an open stream
        assert len(server.command("chat", "Anybody?", "--max-tokens", "950").rstrip()) > 900
        chats_since += supervisor_of(server) not in (None, supervisor)
    assert server.epochs() == before
    assert reopened(server) == moved
    os.kill(server.worker_pid("ray::PrefillActor"), signal.SIGKILL)
    wait_until(lambda: server.epochs().get("prefill-0", "") not in ("", before["prefill-0"]), lambda: server.printed)


def test_the_ray_cluster_lives_in_our_folder_and_needs_our_token(server: Server) -> None:
    (folder,) = server.temporary.glob("ts-*")
    assert (folder / "ray" / "session_latest").exists()
    worker = psutil.Process(server.worker_pid("ray::SupervisorActor"))
    assert worker.environ()["RAY_AUTH_MODE"] == "token"
    assert worker.environ()["RAY_AUTH_TOKEN_PATH"] == str(folder / RAY_TOKEN_FILE)
    assert "RAY_ADDRESS" not in worker.environ()
    commands = " ".join(map(title_of, server.processes()))
    assert folder.stat().st_mode & 0o077 == 0
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 5
    for name in (TOKEN_FILE, RAY_TOKEN_FILE):
        token = (folder / name).read_text()
        assert len(token) == 64
        assert token not in commands
        assert token not in server.printed
        telling = [path for path in files if token.encode() in path.read_bytes()]
        assert telling == [folder / name]
        assert telling[0].stat().st_mode & 0o077 == 0


def test_no_client_forges_or_fills_a_log(server: Server) -> None:
    http = server.address("HTTP").removesuffix("/v1")
    logs = list(server.temporary.glob("ts-*/logs/router-*.log"))  # any router may have the connection
    sizes, forged = [log.stat().st_size for log in logs], "mine error=None outcome=ok"

    def written() -> str:
        return "".join(log.read_text()[size:] for log, size in zip(logs, sizes, strict=True))

    body = json.dumps({"model": "m" * 4_000_000, "prompt": "x"}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": forged}
    request = urllib.request.Request(f"http://{http}/v1/completions", body, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=PATIENCE_S)
    assert refused.value.code == 404
    assert len(refused.value.read()) < 1000
    wait_until(lambda: f'request="{forged}" error=not_found' in written(), written)
    assert len(written()) < 4000


def test_no_log_grows_without_bound(server: Server) -> None:
    """Whatever writes to it: here somebody else, as a library or a kernel's message might."""
    (of_router,) = server.temporary.glob("ts-*/logs/router-0.log")
    worker = server.worker_pid("ray::DecodeActor")
    of_worker = [Path(os.readlink(f"/proc/{worker}/fd/{number}")) for number in (1, 2)]
    for path in (of_router, *of_worker):
        with path.open("ab") as file:
            file.write((b"x" * 127 + b"\n") * (MOST_FILE_BYTES // 128 + 1))
    for path in (of_router, *of_worker):
        wait_until(lambda path=path: path.exists() and path.stat().st_size < MOST_FILE_BYTES)  # type: ignore[misc]
        assert Path(f"{path}.1").stat().st_size > MOST_FILE_BYTES
    assert [Path(os.readlink(f"/proc/{worker}/fd/{number}")) for number in (1, 2)] == of_worker


def test_no_process_of_a_local_cluster_listens_for_other_hosts(server: Server) -> None:
    heard = {
        (connection.laddr.ip, title_of(process)[:80])
        for process in server.processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(heard) > 5
    assert [who for who in heard if who[0] not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")] == []


def test_no_environment_of_a_local_cluster_holds_a_secret(server: Server) -> None:
    (folder,) = server.temporary.glob("ts-*")
    token = (folder / TOKEN_FILE).read_text()
    launcher, *below = server.processes()
    assert len(below) > 5
    for process in below:
        environment = environment_of(process)
        assert token not in environment.values(), title_of(process)
        assert USERS_KEY not in environment.values(), title_of(process)
    assert USERS_KEY in environment_of(launcher).values(), "as the user gave it"
    router = psutil.Process(server.worker_pid("-m router")).environ()
    assert "RAY_AUTH_TOKEN_PATH" not in router
    assert router["PATH"] == os.environ["PATH"]


def test_the_router_loads_neither_torch_nor_ray(server: Server) -> None:
    mapped = Path(f"/proc/{server.worker_pid('-m router')}/maps").read_text()
    assert "grpc" in mapped
    assert "libtorch" not in mapped
    assert "/ray/" not in mapped


def test_a_killed_launcher_takes_everything_with_it(server: Server) -> None:
    """The last test that has this server."""
    processes = server.processes()
    server.end(signal.SIGKILL)
    assert_all_ended(processes)


@pytest.mark.slow
def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with starting(tmp_path, *SMALL, "--prefill", "0") as server:
        server.until_printed("Ctrl-C ends it")
        processes = server.processes()
        # A router that does not end by itself would be waited for.
        os.kill(server.worker_pid("-m router"), signal.SIGSTOP)
        server.process.send_signal(signal.SIGINT)
        server.until_printed("stopping")
        assert server.end(signal.SIGINT) == 130
        assert_all_ended(processes)


def test_a_signal_while_starting_ends_the_start(tmp_path: Path) -> None:
    with starting(tmp_path, *SMALL) as server:
        server.until_printed("starting Ray")
        assert server.end(signal.SIGINT) == 130
        assert "Traceback" not in server.printed


def test_a_worker_that_cannot_start_ends_the_start_with_its_message(tmp_path: Path) -> None:
    with starting(tmp_path, "--model", "paced:no_such_key=1") as server:
        assert server.process.wait(PATIENCE_S) == 2
        last = server.printed.rstrip().splitlines()[-1]
        assert last.startswith("twostroke: ")
        assert "unknown key 'no_such_key'" in last
        assert "Traceback" not in server.printed
