"""A cluster file is the flags of `serve` in sections; what is wrong in it is said in one line with file and line."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cluster.commands.serving import serve
from cluster.file.cluster import leaves, load
from cluster.file.text import parse
from cluster.flags.parser import USAGE_ERROR
from cluster.flags.token import read
from cluster.values.placement import Node, Unplaceable, first_unplaceable
from tests.certificates import DAY, Authority
from tools.cli import PROGRAM, main
from twostroke.base.credentials import TOKEN_VARIABLE
from twostroke.base.errors import ConfigError
from twostroke.config import ClusterConfig, Role, RoleConfig

SMALL = "model: {model: 'paced:'}\ncache: {kv_cache_memory: 1M}\n"
WHOLE = """
ray: {address: "head:6379", wait: 30}
fleet: {port: 50050}
model:
  model: some/model
  dtype: float32
  deterministic: true
prefill:
  count: 2
  threads: 8
  resources: {num_cpus: 4, num_gpus: 1, memory: 2GiB, nvme: 0.5}
  labels: {role: prefill, zone: "in(a, b)"}
decode:
  count: 3
  prefer_labels: {role: decode}
workers: {threads: 4, transports: [shm, tcp], orphan_grace: 9}
routers: {count: 0, host: 0.0.0.0, http_port: 8080}
ports: {rpc: 50052, pages: 50053, metrics: 9091}
routing:
  policy: random
  slo_ttft: 2
  public_prefix: [/etc/a.txt, /etc/b.json]
cache: {block_size: 32, kv_cache_memory: 512M}
schedule: {step_target_ms: 25, local_prefill: false}
"""
FLAGS = [
    *("--address", "head:6379", "--ray-wait", "30", "--fleet-port", "50050", "--model", "some/model"),
    *("--dtype", "float32", "--deterministic", "--prefill", "2", "--decode", "3", "--threads", "4"),
    *("--transports", "shm,tcp", "--orphan-grace", "9", "--routers", "0", "--host", "0.0.0.0", "--http-port", "8080"),
    *("--worker-rpc-port", "50052", "--worker-pages-port", "50053", "--worker-metrics-port", "9091"),
    *("--policy", "random", "--slo-ttft", "2", "--public-prefix", "/etc/a.txt", "--public-prefix", "/etc/b.json"),
    *("--block-size", "32", "--kv-cache-memory", "512M", "--step-target-ms", "25", "--no-local-prefill"),
]


def config_of(text: str) -> ClusterConfig:
    return load(text, "cluster.yaml").config


def test_a_file_says_what_flags_say_and_what_roles_ask_of_nodes() -> None:
    flags = ["serve", *FLAGS]
    by_flags = serve.config_from(PROGRAM.parser(flags).parse_args(flags))
    config = config_of(WHOLE)
    prefill, decode = config.role(Role.PREFILL), config.role(Role.DECODE)
    assert (prefill.threads, prefill.num_cpus, prefill.num_gpus, prefill.memory_bytes) == (8, 4.0, 1.0, 2 << 30)
    assert (prefill.custom, prefill.labels) == ({"nvme": 0.5}, {"role": "prefill", "zone": "in(a, b)"})
    assert (decode.threads, decode.labels, decode.prefer_labels) == (None, {}, {"role": "decode"})
    assert config == by_flags.__class__(
        **{name: getattr(by_flags, name) for name in by_flags.__class__.model_fields}
        | {"prefill_role": prefill, "decode_role": decode}
    )


def test_an_empty_file_means_the_defaults() -> None:
    assert config_of("") == config_of("model:\nprefill: {count:}\n") == ClusterConfig()


def test_every_flag_of_serve_is_a_key_and_no_two_are_the_same() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    serve.add_arguments(parser)
    assert sorted(leaf.name for leaf in leaves().values()) == sorted(a.dest for a in parser._actions)


def test_the_command_line_has_the_last_word_about_the_ray_cluster() -> None:
    assert load(WHOLE, "cluster.yaml", "other:1").config.address == "other:1"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modle: {}", "cluster.yaml:1: unknown key modle; did you mean model?"),
        ("prefill:\n  cuont: 1", "cluster.yaml:2: unknown key prefill.cuont; did you mean prefill.count?"),
        ("\n\nrouting: {policie: kv}", "cluster.yaml:3: unknown key routing.policie; did you mean routing.policy?"),
        ("x: 1", "cluster.yaml:1: unknown key x; known are: adapters, cache, decode,"),
        ("model: 3", "cluster.yaml:1: model must be a section with keys, got a number"),
        ("- a", "cluster.yaml:1: the file must be sections"),
        ("just text", "cluster.yaml:1: the file must be sections"),
        ("prefill: {count: two}", "cluster.yaml:1: prefill.count must be a whole number, got text: 'two'"),
        ("prefill: {count: true}", "prefill.count must be a whole number, got true or false: True"),
        ("prefill: {count: 1.5}", "prefill.count must be a whole number, got a number: 1.5"),
        ("model: {deterministic: 1}", "model.deterministic must be true or false, got a number: 1"),
        ("model: {model: 3}", "model.model must be text, got a number: 3"),
        (
            "model:\n  dtype: float31",
            "cluster.yaml:2: model.dtype must be one of bfloat16, float16, float32, got 'float3",
        ),
        ("routing: {policy: kw}", "routing.policy must be one of"),
        ("cache: {kv_cache_memory: much}", "cache.kv_cache_memory: not a size: 'much'"),
        ("cache: {kv_cache_memory: [1]}", "cache.kv_cache_memory must be a size such as 2GiB, got a list"),
        ("cache: {block_size: 17}", "cluster.yaml:1: cache.block_size must be a power of two"),
        ("decode:\n\n  count: 0", "cluster.yaml:3: decode.count must be 1 or more, got 0"),
        ("workers: {threads: 0}", "cluster.yaml:1: workers.threads must be from 1 to 4096, got 0"),
        (
            "model: {model: 'paced:step_ms=5'}\nworkers: {threads: 100000}",
            "2: workers.threads must be from 1 to 4096, got 1",
        ),
        ("prefill: {threads: 0}", "cluster.yaml:1: prefill.threads must be from 1 to 4096, got 0"),
        ("prefill: {threads: 100000}", "cluster.yaml:1: prefill.threads must be from 1 to 4096, got 100000"),
        ("prefill:\n  resources:\n    num_gpus: -1", "cluster.yaml:3: prefill.resources.num_gpus must be 0 or more"),
        ("prefill: {resources: {num_gpus: 1.5}}", "resources.num_gpus must be a whole number where it is more than 1"),
        ("prefill: {resources: {num_gpus: many}}", "prefill.resources.num_gpus must be a number, got text: 'many'"),
        ("prefill: {resources: {memory: lots}}", "prefill.resources.memory: not a size"),
        ("prefill: {resources: 3}", "prefill.resources must be a section with keys, got a number"),
        ("decode: {labels: {role: a b}}", "cluster.yaml:1: decode.labels.role: 'a b' is not a value of a label"),
        ("decode: {labels: {-role: a}}", "decode.labels.-role: '-role' is not a label of a Ray node"),
        ("decode: {labels: {role: 3}}", "decode.labels.role must be text, got a number: 3"),
        (
            "prefill:\n  resources:\n    cpus: 4",
            "cluster.yaml:3: unknown key prefill.resources.cpus; did you mean prefill.r",
        ),
        ("prefill: {resources: {num_gpu: 4}}", "did you mean prefill.resources.num_gpus?"),
        ("prefill: {resources: {Memory: 4}}", "did you mean prefill.resources.memory?"),
        ("prefill:\n  resources: {nvme: 1, nvme: 2}", "cluster.yaml:2: nvme was said already, on line 2"),
        ("prefill: {labels: [role]}", "prefill.labels must be a section with keys, got a list"),
        ("prefill: {labels: {role: }}", "prefill.labels.role must be text, got nothing"),
        (
            "prefill: {labels: {role: 'in(a'}}",
            "prefill.labels.role: 'in(a' is not a value of a label; write for example",
        ),
        ("prefill: {labels: {role: !spot}}", "cluster.yaml:1: not YAML: expected ' ', but found '}'; quote text"),
        ("routing: {policy: [kv]}", "routing.policy must be text, got a list: ['kv']"),
        ("prefill: {count: -1}", "cluster.yaml:1: prefill.count must be 0 (decode workers do both) or more, got -1"),
        ("prefill: [1]", "cluster.yaml:1: prefill must be a section with keys, got a list"),
        ("model: {}\n---\nmodel: {}", "cluster.yaml:2: a second document begins: write one file"),
        ("model: {<<: {model: x}}", "cluster.yaml:1: merge keys (<<) are not read here"),
        ("? [a]\n: 1", "cluster.yaml:1: a key must be a word, got a list or a section"),
        ("ports:\n  rpc: 70000", "cluster.yaml:2: ports.rpc must be from 0 to 65535, got 70000"),
        (
            "\nscaling: {min_prefill: 4, max_prefill: 2}",
            "cluster.yaml:2: scaling.min_prefill 4, prefill.count 1, scaling",
        ),
        ("security: {tls_cert: a}", "cluster.yaml:1: security.tls_cert needs security.tls_key"),
        ("tracing: {otlp_endpoint: x}", "cluster.yaml:1: tracing.otlp_endpoint must be http://HOST:PORT"),
        ("ports: {rpc: 7, pages: 7}", "cluster.yaml:1: the worker's ports must differ, got [7, 7]"),
        ("routing: {suspect_after: 0.1}", "cluster.yaml:1: routing.suspect_after (0.1) must be more than"),
        ("a: 1\na: 2", "cluster.yaml:2: a was said already, on line 1"),
        ("a: &x 1\nb: *x", "cluster.yaml:2: not YAML: aliases"),
        ("a: [1", "cluster.yaml:1: not YAML:"),
        ("\t- x", "not YAML: found character '\\t'"),
        ("a: !!python/object:os.system {}", "cluster.yaml:1: tags (!!python/object:os.system) are not read here"),
        ("3: x", "cluster.yaml:1: a key must be a word, got '3'"),
        ("a: \x00", "cluster.yaml: not YAML:"),
        ("a: " + "[" * 5000, "cluster.yaml"),
        ("a: " + "{a: " * 20 + "1" + "}" * 20, "cluster.yaml:1: too many sections in sections"),
        ("a: 2020-13-45", "cluster.yaml:1:"),
    ],
)
def test_what_is_wrong_is_one_line_that_says_where_and_what(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        config_of(text)
    assert said in raised.value.message
    assert "\n" not in raised.value.message
    assert "--" not in raised.value.message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ray: {address: nowhere}", ":1: ray.address must be HOST:PORT of a Ray head, or auto, got 'nowhere'"),
        ('ray:\n  address: "127.0.0.1:1"', ":2: ray.address 127.0.0.1:1: nothing answers there"),
        ("model:\n  model: no/such/dir/", ":2: model.model 'no/such/dir/' is not a directory here"),
        ("workers: {transports: [pigeon]}", ":1: workers.transports must be some of"),
        ("cache: {kv_cache_memory: 1000T}", ":1: cache.kv_cache_memory: 2 workers with"),
        ("security:\n  token_file: /no/such/secret", ":2: security.token_file /no/such/secret: No such file"),
        ("routers: {http_port: 7001, grpc_port: 7001}", ":1: routers.http_port and routers.grpc_port are both 7001"),
        ("security: {api_keys: /no/keys}", ":1: security.api_keys"),
        ("\nsecurity: {tls_cert: /no/c, tls_key: /no/k}", ":2: security.tls_cert"),
        ("ray: {address: 'ray://head:10001'}", ":1: ray.address must be HOST:PORT of a Ray head, or auto, got 'ray://"),
        ("ray: {address: 'no.such.host.invalid:1'}", ":1: ray.address no.such.host.invalid:1: nothing answers there"),
        ("fleet: {port: 7001}\nrouters: {grpc_port: 7001}", ":2: fleet.port and routers.grpc_port are both 7001"),
        ("routers: {host: 203.0.113.9}", ":1: routers.host 203.0.113.9 is not an address of this machine"),
        ("routing: {request_log: /no/such/log}", ":1: routing.request_log /no/such/log: the directory does not"),
        ("routing: {public_prefix: [/no/file]}", ":1: routing.public_prefix /no/file: No such file or directory"),
        ("prefill: {count: 1}\ndecode: {threads: 4000}", ":2: decode.threads 4000: this machine lets us use"),
        (f"{SMALL}prefill:\n  resources:\n    num_cpus: 4000", ":5: prefill.resources.num_cpus: a prefill worker asks"),
        (f"{SMALL}decode: {{resources: {{nvme: 1}}}}", ":3: decode.resources.nvme: a decode worker asks for 1 nvme,"),
        (f"{SMALL}decode: {{labels: {{zone: mars}}}}", ":3: decode.labels.zone: no node for decode workers has zone=m"),
        ("ports: {rpc: 7001}", ":1: workers with fixed ports need a node each"),
    ],
)
def test_what_turns_out_while_starting_is_said_of_the_file_too(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text if "routers" in text else f"{text}\nrouters: {{http_port: 0, grpc_port: 0}}\n")
    assert main(["up", "-f", str(file)]) == USAGE_ERROR
    told = capsys.readouterr().err
    assert told.startswith(f"twostroke: {file}{said}")
    assert told.count("\n") == 1
    assert "--" not in told.replace("ray start --head", "")


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("token_file: OPEN", "security.token_file OPEN may be read by every user of this host: chmod 600 OPEN"),
        ("token_file: FOLDER", "security.token_file FOLDER: Is a directory; make one with: "),
        ("api_keys: NOTHING", "security.api_keys NOTHING: No such file or directory"),
        ("api_keys: TWICE", "security.api_keys TWICE, line 2: 'keys' is there twice"),
        ("api_keys: FOLDER", "security.api_keys FOLDER: Is a directory"),
        ("{tls_cert: ours.crt, tls_key: NOTHING}", "security.tls_key NOTHING cannot be read: No such file"),
        ("{tls_cert: ours.crt, tls_key: other.key}", "security.tls_key other.key is not the key of security.tls_cert"),
        ("{tls_cert: OPEN, tls_key: ours.key}", "security.tls_cert OPEN is no PEM file"),
        ("{tls_cert: old.crt, tls_key: old.key}", "security.tls_cert old.crt has expired: issue a new one"),
        ("{tls_cert: ours.crt, tls_key: ours.key, tls_client_ca: OPEN}", "security.tls_client_ca OPEN is no PEM file"),
        ("{tls_cert: ours.crt, tls_key: shown.key}", "security.tls_key shown.key may be read by every user"),
    ],
)
def test_a_secret_or_a_certificate_that_will_not_do_is_named_by_a_check_and_by_a_start(
    section: str, said: str, checks: bool, material: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def there(text: str) -> str:
        return re.sub(r"\b(OPEN|FOLDER|NOTHING|TWICE|\w+\.(crt|key))\b", lambda name: str(material / name[0]), text)

    file = material / "cluster.yaml"
    text = there(section)
    file.write_text(
        f"routers: {{http_port: 0, grpc_port: 0}}\nsecurity:{' ' if text.startswith('{') else chr(10) + '  '}{text}\n"
    )
    assert main(["up", "-f", str(file), *(["--check"] if checks else [])]) == USAGE_ERROR
    told = capsys.readouterr().err
    assert re.match(rf"twostroke: {re.escape(str(file))}:[23]: {re.escape(there(said))}", told), told
    assert told.count("\n") == 1


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    authority = Authority(folder)
    for name in ("ours", "other"):
        authority.issue(name)
    authority.issue("old", lasts=-DAY)
    shown = folder / "shown.key"
    shown.write_bytes((folder / "ours.key").read_bytes())
    shown.chmod(0o644)
    (folder / "OPEN").write_text("a" * 64)
    (folder / "OPEN").chmod(0o644)
    (folder / "TWICE").write_text("keys: {}\nkeys: {}\n")
    (folder / "FOLDER").mkdir()
    return folder


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1", "h:70000", "ray://h:1", "auto"])
@pytest.mark.parametrize(
    "command",
    [
        ["scale", "--decode", "2"],
        ["role", "decode-0", "prefill"],
        ["drain", "decode-0", "--deadline", "0"],
        ["drain", "--node", "here", "--deadline", "0"],
        ["restart", "decode-0", "--deadline", "0"],
        ["down"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_head_that_does_not_answer_is_named_before_ray_is_loaded(
    command: list[str], address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("cluster.ray.address.CURRENT", Path("/no/cluster"))
    assert main([*command, "--address", address]) == USAGE_ERROR
    told = capsys.readouterr().err
    assert told.startswith("twostroke: --address ")
    assert told.count("\n") == 1
    assert address in told


@pytest.mark.parametrize("command", [["trace", "x"], ["status"]])
@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999"])
def test_an_admin_port_that_cannot_be_one_is_refused(
    command: list[str], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--admin", address]) == USAGE_ERROR
    assert (
        capsys.readouterr().err == f"twostroke: --admin must be HOST:PORT of a router's admin port, got {address!r}\n"
    )


def test_workers_that_fit_one_by_one_but_not_together_are_refused() -> None:
    asked = RoleConfig(num_cpus=3)
    one = [Node("n", "h", {}, {"CPU": 4.0})]
    assert first_unplaceable(one, [(Role.PREFILL, asked, 1), (Role.DECODE, asked, 0)]) is None
    found = first_unplaceable(one, [(Role.PREFILL, asked, 1), (Role.DECODE, asked, 1)])
    assert found == (
        Role.DECODE,
        Unplaceable("resources.num_cpus", "all workers together ask for 6 CPU, and nodes have 4"),
    )


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "-f", str(tmp_path / "none.yaml")]) == USAGE_ERROR
    assert main(["up", "-f", str(tmp_path)]) == USAGE_ERROR
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert main(["up", "-f", str(tmp_path / "binary")]) == USAGE_ERROR
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("none.yaml: No such file or directory")
    assert said[1] == f"twostroke: {tmp_path}: Is a directory"
    assert "binary: not a text file" in said[2]


def test_a_file_can_be_checked_without_starting_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster.yaml").write_text(WHOLE)
    assert main(["up", "-f", str(tmp_path / "cluster.yaml"), "--check"]) == 0
    assert "2 prefill, 3 decode, some/model" in capsys.readouterr().out


@pytest.mark.parametrize("secret", ["", "short", "two words and more of them", "é" * 20])
def test_a_secret_that_is_none_is_refused_without_being_shown(secret: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(secret)
    with pytest.raises(ConfigError) as raised:
        read(str(file))
    assert str(file) in raised.value.message
    assert "openssl rand" in raised.value.message
    assert not secret or secret not in raised.value.message


def test_a_secret_as_the_documents_make_it_is_one(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("NOT CHECKED: openssl is missing")
    made = subprocess.run(["openssl", "rand", "-hex", "32"], capture_output=True, text=True, check=True)
    (tmp_path / "token").write_text(made.stdout)
    (tmp_path / "token").chmod(0o600)
    assert len(read(str(tmp_path / "token"))) == 64


def test_a_secret_that_the_environment_names_is_not_blamed_on_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "/no/such/secret")
    assert main(["serve", "--http-port", "0", "--grpc-port", "0"]) == USAGE_ERROR
    assert capsys.readouterr().err.startswith(f"twostroke: ${TOKEN_VARIABLE} /no/such/secret: No such file")


def test_lines_are_those_of_keys() -> None:
    whole = parse("a:\n  b: 1\n  c:\n    - 2\n", "f")
    assert whole.plain() == {"a": {"b": 1, "c": [2]}}
    assert (whole.value["a"].line, whole.value["a"].value["c"].line) == (1, 3)
