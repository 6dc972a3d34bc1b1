"""Flags of `twostroke serve` become the config; what is wrong is named in one line."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cluster.commands.serving.serve import config_from
from cluster.flags.parser import USAGE_ERROR
from cluster.launch import start_checks
from cluster.values.spec import RouterPorts, fleet_spec, router_configs, router_ports
from tools.cli import COMMANDS, PROGRAM, main
from twostroke.base.credentials import TlsConfig
from twostroke.base.errors import ConfigError
from twostroke.config import DEVICE_SHARE, ClusterConfig, EndpointsConfig, ListenConfig, RoutingConfig
from twostroke.config.cache import memory_bytes, size_text
from twostroke.kv_cache.memory import available_memory_bytes

CLUSTER_FILES = {"cert": "w.crt", "key": "w.key", "ca": "ca"}


def config_of(*flags: str) -> ClusterConfig:
    arguments = ["serve", *flags]
    return config_from(PROGRAM.parser(arguments).parse_args(arguments))


def test_no_flags_mean_the_defaults_of_the_config() -> None:
    assert config_of() == ClusterConfig()


def test_every_flag_reaches_the_config() -> None:
    config = config_of(
        *("--prefill", "2", "--decode", "3", "--host", "0.0.0.0", "--http-port", "1", "--grpc-port", "2"),
        *("--threads", "4", "--dtype", "float32", "--block-size", "32", "--policy", "random", "--model", "some/model"),
        *("--max-model-len", "100", "--max-num-seqs", "5", "--max-num-batched-tokens", "64", "--seed", "6"),
        *("--pin", "--no-borrow", "--step-target-ms", "25", "--no-local-prefill"),
        *("--device", "cuda:1", "--kv-cache-memory", "512M", "--served-model-name", "name", "--address", "host:6379"),
        *("--suspect-after", "2", "--dead-after", "5", "--orphan-grace", "9"),
        *("--request-log", "/tmp/log.jsonl", "--routers", "2", "--slo-ttft", "2.5", "--max-queued-requests", "77"),
    )
    assert (config.prefill, config.decode, config.routers, config.runtime.threads, config.routing.seed) == (
        2,
        3,
        2,
        4,
        6,
    )
    assert (config.listen.host, config.listen.http_port, config.listen.grpc_port) == ("0.0.0.0", 1, 2)
    assert (config.routing.policy, config.address) == ("random", "host:6379")
    assert config.routing.request_log == "/tmp/log.jsonl"
    assert (config.routing.slo_ttft_s, config.routing.max_queued_requests) == (2.5, 77)
    assert (config.patience.suspect_after_s, config.patience.dead_after_s) == (2.0, 5.0)
    assert {worker.runtime.orphan_grace_s for worker in fleet_spec(config, token="", port=0).workers} == {9.0}
    assert {worker.patience for worker in fleet_spec(config, token="", port=0).workers} == {config.patience}
    assert (config.model.model, config.model.dtype, config.model.max_model_len) == ("some/model", "float32", 100)
    assert (config.model.public_name, config.model.device) == ("name", "cuda:1")
    assert (config.cache.block_size, config.cache.kv_cache_memory_bytes) == (32, 512 << 20)
    assert (config.schedule.max_num_seqs, config.schedule.max_num_batched_tokens) == (5, 64)
    assert (config.runtime.pin, config.runtime.borrow) == (True, False)
    assert (config.schedule.step_target_s, config.schedule.local_prefill) == (0.025, False)


def test_a_request_log_is_where_the_user_stands_not_where_the_router_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_of("--request-log", "log.jsonl").routing.request_log == str(tmp_path / "log.jsonl")


def test_certificates_come_with_their_keys_and_paths_that_hold_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = ("--cluster-tls-cert", "w.crt", "--cluster-tls-key", "w.key", "--cluster-tls-ca", "ca")
    config = config_of("--tls-cert", "a.crt", "--tls-key", "/k", *cluster)
    assert config.certificates.clients == TlsConfig(cert=str(tmp_path / "a.crt"), key="/k")
    assert {worker.cluster_tls for worker in fleet_spec(config, token="", port=0).workers} == {
        config.certificates.cluster
    }
    assert config.certificates.cluster == TlsConfig(**{k: str(tmp_path / f) for k, f in CLUSTER_FILES.items()})
    assert config_of(*cluster, "--transports", "nixl", "--unencrypted-nixl").runtime.transports == ("nixl",)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--tls-cert", "a"), "--tls-cert needs --tls-key, too"),
        (("--tls-client-ca", "a"), "--tls-client-ca needs --tls-cert and --tls-key"),
        (("--cluster-tls-ca", "a"), "--cluster-tls-ca needs --cluster-tls-cert and --cluster-tls-key, too"),
        (
            (*(f"--cluster-tls-{part}=x" for part in ("cert", "key", "ca")), "--transports", "nixl,tcp"),
            "--transports nixl does not go with --cluster-tls-cert",
        ),
    ],
)
def test_half_a_certificate_and_what_cannot_be_encrypted_are_refused(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(*flags)
    assert refused.value.message.startswith(said)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("512M", 512 << 20),
        ("2G", 2 << 30),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("100kB", 100_000),
        ("100B", 100),
        ("1T", 1 << 40),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size_bytes: int) -> None:
    assert memory_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", "1GG", "a lot", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        memory_bytes(text)


def test_int8_weights_reach_the_config() -> None:
    assert config_of("--weights", "int8").model.weights == "int8"


@pytest.mark.parametrize("size_bytes", [1 << 30, 512 << 20, 1000])
def test_a_size_is_shown_as_it_can_be_typed(size_bytes: int) -> None:
    assert memory_bytes(size_text(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--weights", "int8", "--dtype", "float32"], "--weights int8"),
        (["--kv-cache-memory", "1000T"], "--kv-cache-memory"),
        (["--threads", "4000"], "--threads 4000: this machine"),
        (["--step-target-ms", "inf"], "--step-target-ms must be positive and finite"),
        (["--transports", "pigeon"], "--transports must be some of"),
        (["--transports", "shm,shm"], "--transports"),
        (["--transports", ""], "--transports"),
        (["--device", "gpu"], "--device must be auto, cpu, cuda or cuda:N"),
        (["--device", "cuda", "--weights", "int8"], "--weights int8 is for CPUs"),
        (["--device", "cuda:1", "--deterministic"], "--deterministic cannot be kept on CUDA"),
        (
            ["--device", "cuda", "--decode-tp", "2", "--lora-modules", "a=b"],
            "--decode-tp 2: adapters are shared out over ranks on CPUs only",
        ),
        (["--model", "no/such/directory/anywhere/"], "no/such/directory/anywhere"),
        (["--model", "paced:speed=9"], "--model paced: unknown key 'speed'"),
        (["--worker-rpc-port", "7001"], "workers with fixed ports need a node each"),
        (["--token-file", "/no/such/secret"], "--token-file /no/such/secret: No such file"),
        (["--host", "203.0.113.1"], "--host"),
        (["--address", "nowhere"], "--address"),
        (["--address", "127.0.0.1:1"], "--address"),
        (["--http-port", "7001", "--grpc-port", "7001"], "--grpc-port"),
        (["--admin-port", "7001", "--metrics-port", "7001"], "--admin-port and --metrics-port are both 7001"),
        (["--metrics-host", "127.0.0.1"], "--metrics-host needs --metrics-port"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_the_flag_and_status_2(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--http-port", "0", "--grpc-port", "0", *flags]) == USAGE_ERROR
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("twostroke: ")
    assert named in said


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port", "--admin-port", "--metrics-port"])
def test_a_port_in_use_is_refused_before_anything_starts(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--http-port", "0", "--grpc-port", "0", flag, str(port)]) == USAGE_ERROR
    assert f"{flag} {port} is in use" in capsys.readouterr().err


@pytest.mark.parametrize("has_gpu", [False, True])
def test_pools_that_fit_one_by_one_but_not_together_are_refused(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pages of a paced model are in host memory, whatever else is in the machine."""
    monkeypatch.setattr(start_checks, "NVIDIA_DRIVER", Path("/" if has_gpu else "/nowhere"))
    size_bytes = available_memory_bytes() * 3 // 4
    flags = ["--http-port", "0", "--grpc-port", "0", "--model", "paced:", "--kv-cache-memory", str(size_bytes)]
    assert main(["serve", *flags]) == USAGE_ERROR
    assert "--kv-cache-memory: 2 workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "int3"],
        ["--threads", "abc"],
    ],
)
def test_a_value_that_is_none_of_the_choices_is_refused_in_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *flags])
    assert ended.value.code == USAGE_ERROR
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert flags[0] in said
    assert said.endswith("; see: twostroke serve --help\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert COMMANDS[command].help[1:] in " ".join(capsys.readouterr().out.split())


def test_help_shows_the_defaults_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for default in (
        "default: 8000",
        "default: 50051",
        "default: bfloat16",
        "default: 1GiB",
        "default: smollm2-135m",
        "128 to 512 on CPUs",
    ):
        assert default in said


def test_workers_that_may_share_a_gpu_share_its_memory_out() -> None:
    config = config_of("--prefill", "1", "--decode", "2")
    assert config.cache.kv_cache_memory_bytes is None
    shares = [worker.cache.device_share for worker in fleet_spec(config, token="", port=0).workers]
    assert sum(shares) == pytest.approx(DEVICE_SHARE)
    assert len(set(shares)) == 1


def test_every_router_refuses_and_holds_as_the_cluster_is_told() -> None:
    config = config_of("--slo-ttft", "2.5", "--max-queued-requests", "77", "--routers", "2")
    configs = router_configs(config, token="t", fleet_address="f:1", model_dir="")
    assert [(each.routing.slo_ttft_s, each.routing.max_queued_requests) for each in configs] == [(2.5, 77)] * 2


def test_several_routers_have_the_same_ports_for_clients_and_draw_differently() -> None:
    configs = router_configs(
        ClusterConfig(routers=3, listen=ListenConfig(grpc_port=0), routing=RoutingConfig(seed=5)),
        token="t",
        fleet_address="f:1",
        model_dir="",
    )
    assert [(each.listen.http_port, each.listen.grpc_port) for each in configs] == [(8000, 0)] * 3
    assert [(each.routing.seed, each.number) for each in configs] == [(5, 0), (5, 1), (5, 2)]


def test_an_operator_can_tell_routers_apart_by_their_ports() -> None:
    assert router_ports(ClusterConfig())[0].metrics is None, "one router has its metrics on the clients' port"
    both = router_ports(ClusterConfig(routers=2))
    assert both == [RouterPorts(8000, 50051, 0, 0)] * 2, "any free ports, each its own"
    endpoints = EndpointsConfig(admin_port=7000, metrics_port=9090)
    second = router_ports(ClusterConfig(routers=2, endpoints=endpoints))[1]
    assert second == RouterPorts(8000, 50051, 7001, 9091)


def test_routers_whose_ports_would_meet_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--http-port and --grpc-port are both 8000$"):
        router_ports(ClusterConfig(listen=ListenConfig(grpc_port=8000)))
    endpoints = EndpointsConfig(admin_port=7999)
    with pytest.raises(ConfigError, match="--http-port and --admin-port are both 8000 for some of the 3 routers"):
        router_ports(ClusterConfig(routers=3, endpoints=endpoints))
    router_ports(ClusterConfig(routers=1, endpoints=endpoints))


def test_routers_may_run_elsewhere() -> None:
    assert router_ports(ClusterConfig(routers=0)) == []
