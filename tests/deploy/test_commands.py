"""What the READMEs and the claims tell people to type is run by a test, or is said not to be, with the reason.

A new command there wants a line in `RUN_BY`, or `not run: REASON` beside it (see `documents`). What is only named, as
`ray up`, may be the beginning of a command that is settled.
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.file.cluster import known_keys
from tests.certificates import Authority
from tests.deploy.documents import Command, codes, commands
from tests.deploy.tools import ROOT, tool
from tests.trials.bench import __main__ as bench
from tests.trials.chaos.faults import options
from tools.cli import COMMANDS, PROGRAM

READMES = ("README.md", "docs/claims.md", "deploy/README.md")
DOCUMENTS = sorted(
    {*READMES, "CONTRIBUTING.md", "SECURITY.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))}
)
FAULTS = "faults"
"""It runs as `make faults`, with flags of its own."""
ALL_COMMANDS = (*COMMANDS, *bench.COMMANDS, FAULTS)
SUFFIXES = ("json", "md", "py", "yaml")
"""The suffixes of files, which are not keys."""
GATE = "the gate"
"""`.ci/run` is `make test`; what that makes first is run by it, too."""
SERVE = "tests/cluster/fleet/test_serve.py"
JOIN = "tests/cluster/fleet/test_join.py"
ROLLING = "tests/cluster/fleet/test_rolling.py"
START = "tests/trials/chaos/hosts/test_start_scripts.py"
CHECK = "tests/deploy/test_manifests.py"
KEEP = f"{JOIN}::test_what_a_killed_launcher_left_is_taken_over_with_its_file_and_with_nothing_else"
JOINED = f"{JOIN}::test_it_serves_on_the_joined_cluster_and_takes_only_its_own_actors_away"
THREE = "tests/trials/chaos/hosts/test_hosts.py"
HOSTS = f"{THREE}::test_three_hosts_serve_across_and_a_pulled_cable_loses_nothing"
MADE = "tests/cluster/cache/test_served_cache.py::server"
ROLLED = f"{ROLLING}::test_a_rolling_restart_of_every_process_fails_no_request_and_changes_no_token_and_ctrl_c_ends_all"
PASTED = f"{SERVE}::test_the_printed_commands_and_those_of_the_readme_can_be_pasted"
OF_A_NODE = f"{START}::test_it_runs_until_it_is_told_to_end_with_ray_asked_for_token_tls_and_fast_notice"

RUN_BY: dict[str, tuple[str, str]] = {
    "make serve": (MADE, "by_make=True"),
    'make serve ARGS="--prefill 2 --decode 2 --model DIR"': (MADE, "ARGS"),
    "make test": (GATE, "test"),
    "make .tools": (GATE, ".tools"),
    "make .venv/.serve": (GATE, "$(VENV)/.serve"),
    "curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d "
    """'{"model": "smollm2-135m", "messages": [{"role": "user", "content": "Why is the sky blue?"}], """
    """"stream": true}'""": (PASTED, "curl"),
    ".venv/bin/twostroke chat --grpc 127.0.0.1:50051 'Why is the sky blue?'": (PASTED, "chat"),
    "twostroke simulate": (
        "tests/unit/tools/simulate/test_commands.py::test_policies_are_compared_at_every_pace_with_round_robin",
        "simulated_and_drawn(",
    ),
    "twostroke bill": (
        "tests/unit/tools/bill/test_bill.py::test_a_log_gives_tables_a_page_and_json",
        '["bill", ',
    ),
    "twostroke bench compare": (
        "tests/unit/tools/bench/test_compare_session.py::test_two_endpoints_get_the_same_prompts_in_turns_and_end_in_ratios",
        "compare",
    ),
    "twostroke serve": (f"{SERVE}::server", "SMALL"),
    "twostroke trace": (
        "tests/cluster/operation/test_traces.py::test_a_request_is_one_trace_over_all_processes_and_its_waterfall_needs_no_collector",
        '"trace"',
    ),
    "twostroke profile": (
        "tests/cluster/operation/test_profile.py::test_a_profile_shows_the_steps_that_workers_ran_and_the_requests_they_were_for",
        "profiled(",
    ),
    "twostroke serve --help": (
        "tests/unit/cluster/commands/test_serve_flags.py::test_every_command_explains_itself",
        '[command, "--help"]',
    ),
    "twostroke up -f deploy/examples/one-machine.yaml --check": (
        "tests/deploy/test_ray_up.py::test_examples_are_cluster_files",
        '"--check"',
    ),
    "twostroke up -f deploy/examples/one-machine.yaml": (ROLLED, "one-machine.yaml"),
    "twostroke down --address HEAD:6379": (KEEP, 'asked(owner, "down")'),
    "twostroke console": ("tests/console/conftest.py::serving", 'command("console"'),
    "twostroke scale": (f"{SERVE}::test_how_many_workers_are_wanted_is_told", '"scale"'),
    "openssl rand -hex 32": (
        "tests/unit/cluster/file/test_cluster_file.py::test_a_secret_as_the_documents_make_it_is_one",
        '"openssl", "rand", "-hex", "32"',
    ),
    "RAY=/opt/twostroke/.venv/bin/ray RAY_AUTH_TOKEN_PATH=/etc/twostroke/ray.token ROLE=decode "
    "deploy/ray/start-head.sh": (OF_A_NODE, "ROLE"),
    "RAY=/opt/twostroke/.venv/bin/ray RAY_AUTH_TOKEN_PATH=/etc/twostroke/ray.token ROLE=prefill HEAD=HEAD:6379 "
    "deploy/ray/start-worker.sh": (OF_A_NODE, "ROLE"),
    "deploy/ray/job.sh deploy/examples/hosts.yaml": (
        "tests/deploy/test_ray_up.py::test_a_job_brings_its_file_and_goes_on_with_the_fleet",
        "job.sh",
    ),
    "systemd-analyze verify": (
        f"{START}::test_systemd_takes_the_units_and_they_start_the_scripts_again",
        '"systemd-analyze", "verify"',
    ),
    ".venv/bin/twostroke up -f deploy/examples/hosts.yaml --address HEAD:6379": (KEEP, "hosts.yaml"),
    "TWOSTROKE_TOKEN_FILE=/etc/twostroke/token .venv/bin/twostroke router --fleet HEAD:50050 --host 0.0.0.0": (
        "tests/cluster/fleet/test_router_command.py::test_it_waits_for_the_fleet_serves_and_drains_and_nobody_reads_the_token_from_outside",
        '"--host", "0.0.0.0"',
    ),
    "twostroke up --keep": (KEEP, '"--keep"'),
    "twostroke keys add --file keys.yaml --tenant first": (
        "tests/unit/cluster/commands/test_keys.py::test_a_key_is_shown_once_and_only_its_hash_is_kept",
        '"--tenant"',
    ),
    "make manifests": (f"{CHECK}::test_a_bundle_has_no_mistake", "found(name)"),
    "python -m tests.deploy.check FOLDER_OR_FILE": (
        f"{CHECK}::test_the_command_says_where_a_mistake_is",
        "check.main",
    ),
}
"""Command -> (FILE::FUNCTION that runs it, or one like it at another port, on another folder or with a smaller model;
words of that function that do)."""
RAYUP = "tests/trials/chaos/rayup/test_rayup.py::test_ray_up_makes_a_cluster_that_serves_and_ray_down_ends_it"
LOCAL = "deploy/ray/cluster.local.yaml"
RUN_BY_HAND: dict[str, tuple[str, str, str]] = {
    "ray start": ("slow", HOSTS, "tests.trials.chaos.hosts"),
    "twostroke serve --address HEAD:6379 --prefill 1 --decode 1": ("slow", JOINED, '"--address"'),
    f"ray up {LOCAL}": ("rayup", RAYUP, "ray up --yes {CLUSTER}"),
    f"ray dashboard {LOCAL}": ("rayup", RAYUP, "ray dashboard {CLUSTER}"),
    "export RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 RAY_AUTH_MODE=token "
    "RAY_AUTH_TOKEN_PATH=~/.twostroke/ray.token": ("rayup", RAYUP, "{EXPORT}"),
    "ray job logs --follow twostroke": ("rayup", RAYUP, "ray job logs --follow twostroke"),
    "ray job stop twostroke": ("rayup", RAYUP, "ray job stop twostroke"),
    f"ray exec {LOCAL} 'twostroke down --address auto'": ("rayup", RAYUP, "ray exec {CLUSTER}"),
    f"ray down {LOCAL}": ("rayup", RAYUP, "ray down --yes {CLUSTER}"),
    "ray stop": ("rayup", RAYUP, "ray down --yes {CLUSTER}"),
}
"""Command -> (target of the Makefile, FILE::FUNCTION, words): as `RUN_BY`, by a test that is too slow for the gate."""


@functools.cache
def told() -> list[Command]:
    return [command for name in READMES for command in commands(ROOT / name, name)]


def is_settled(command: Command) -> bool:
    return command.text in RUN_BY or command.text in RUN_BY_HAND or command.excuse is not None


def names(command: Command, other: Command) -> bool:
    """It is the beginning of the other one."""
    mine, others = ([each.program, *each.words[1:]] for each in (command, other))
    return len(mine) < len(others) and others[: len(mine)] == mine


def test_every_command_of_the_readmes_is_run_by_a_test_or_says_why_not() -> None:
    assert len(told()) > 60, "documents are not read any more"
    settled = [command for command in told() if is_settled(command)]
    open_ones = [
        str(command)
        for command in told()
        if not is_settled(command) and not any(names(command, other) for other in settled)
    ]
    assert not open_ones, "neither in RUN_BY, or RUN_BY_HAND, nor said to be `not run: REASON`:\n" + "\n".join(
        open_ones
    )


def test_a_command_that_is_run_is_told_and_is_not_said_to_be_not_run() -> None:
    run = RUN_BY.keys() | RUN_BY_HAND.keys()
    assert run <= {command.text for command in told()}
    assert not [str(command) for command in told() if command.is_excused_beside and command.text in run]


@pytest.mark.parametrize("command", RUN_BY)
def test_the_test_that_runs_a_command_is_there_and_part_of_the_gate(command: str) -> None:
    where, words = RUN_BY[command]
    if where == GATE:
        assert words in made_by_the_gate()
        return
    file, _, function = where.partition("::")
    source = source_of(ROOT / file, function)
    assert words in source, f"{where} does not say {words}"
    assert "mark.slow" not in source


@pytest.mark.parametrize("command", RUN_BY_HAND)
def test_the_target_whose_test_runs_a_command_is_there(command: str) -> None:
    target, where, words = RUN_BY_HAND[command]
    file, _, function = where.partition("::")
    source = source_of(ROOT / file, function)
    assert words in source, f"{where} does not say {words}"
    assert "mark.slow" in source
    assert target in makefile().keys() - made_by_the_gate()
    assert f"make {target} " in (ROOT / "Makefile").read_text()
    assert "-m slow" in recipe(target)
    assert any(Path(file).is_relative_to(tests) for tests in re.findall(r"tests/[\w./]+", recipe(target)))


def test_kubectl_takes_the_commands_that_make_objects(tmp_path: Path) -> None:
    """Its parser does: there is no cluster."""
    kubectl = tool("kubectl")
    makers = [command for command in told() if command.program == "kubectl" and "create" in command.words]
    assert len(makers) > 6
    authority = Authority(tmp_path)
    for name in ("gateway", "tls"):
        authority.issue(name)
    for name in ("keys.yaml", "ca.crt"):
        (tmp_path / name).write_text("x")
    for command in makers:
        line = f"{kubectl} {' '.join(command.words[1:])} --dry-run=client --output=name"
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_the_end_begins_with_the_raycluster() -> None:
    """KubeRay's Redis clean-up job needs what the overlay has beside it."""
    ends = [command.text for command in told() if command.program == "kubectl" and "delete" in command.words]
    (cluster,) = (number for number, text in enumerate(ends) if "delete raycluster twostroke" in text)
    (rest,) = (number for number, text in enumerate(ends) if "delete -k OVERLAY" in text)
    assert cluster < rest


def source_of(file: Path, function: str) -> str:
    """With its decorators."""
    text = file.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise AssertionError(f"{file} has no function {function}")


def makefile() -> dict[str, list[str]]:
    """Prerequisites by target."""
    rules = re.findall(r"^([^\s:#][^:=#\n]*):(?!=)((?:[^=\n]|%=)*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {target: needed.split() for targets, needed in rules for target in targets.split()}


def recipe(target: str) -> str:
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None, f"the Makefile has no recipe of {target}"
    return found[1]


def made_by_the_gate() -> set[str]:
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()
    assert "--output-sync=target .checked\n" in (ROOT / "Makefile").read_text()
    rules, made, left = makefile(), set[str](), ["test", ".checked"]
    while left:
        target = left.pop()
        made.add(target)
        left += rules.get(target, [])
    return made


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_flags_keys_targets_and_files_that_documents_name_are_there(name: str) -> None:
    blocks = [(command.line, command.text) for command in commands(ROOT / name, name)]
    unknown = [
        f"{name}:{line}: {what}" for line, text in [*blocks, *codes(ROOT / name)] for what in unknown_of(text, ROOT)
    ]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("twostroke sreve --prefill 1", "twostroke sreve"),
        ("X=1 .venv/bin/twostroke serve --prefil 1 --decode 2", "serve --prefil"),
        ("drain --nodes=here", "drain --nodes"),
        ("--slo-tpot", "--slo-tpot"),
        ("make serv ARGS=x", "make serv"),
        ("routing.slo_tpot", "key routing.slo_tpot"),
        ("tests/cluster/test_nothing.py", "tests/cluster/test_nothing.py"),
        ("worker/calibration.py", "worker/calibration.py"),
        ("python -m tests.bench_nothing --help", "python -m tests.bench_nothing"),
    ],
)
def test_what_is_not_there_is_named(text: str, what: str) -> None:
    assert list(unknown_of(text, ROOT)) == [what]


def unknown_of(text: str, root: Path) -> Iterator[str]:
    """What of a command or of a name in backquotes is not there."""
    flags = sorted(set(_FLAG.findall(text)))
    if ours := words_of_ours(text):
        if ours[0] in ALL_COMMANDS:
            yield from (f"{ours[0]} {flag}" for flag in flags if flag not in flags_of(ours[0]))
        elif re.fullmatch("[a-z]+", ours[0]):  # others stand for any, as COMMAND does
            yield f"twostroke {ours[0]}"
    elif text.startswith("--"):
        yield from (flag for flag in flags if not any(flag in flags_of(command) for command in ALL_COMMANDS))
    elif (made := re.match(r"make (?:-\S+ )*([\w./-]+)", text)) is not None:
        if made[1].replace(".venv", "$(VENV)") not in makefile():
            yield f"make {made[1]}"
    elif (key := re.fullmatch(r"([a-z]+)\.([a-z_]+)", text)) is not None and key[1] in known_keys():
        if key[2] not in {*known_keys(key[1]), *SUFFIXES}:
            yield f"key {text}"
    elif (
        module := re.match(r"python3? -m ((?:tests|twostroke|cluster|router|decode_worker|prefill_worker)[\w.]*)", text)
    ) is not None:
        if not any((root / f"{module[1].replace('.', '/')}{end}").exists() for end in (".py", "/__main__.py")):
            yield f"python -m {module[1]}"
    elif _PATH.fullmatch(text) and not (root / text).exists():
        yield text


_FOLDERS = "tests|deploy|docs|tools|cluster|router|twostroke|decode_worker|prefill_worker|proto"
_PATH = re.compile(rf"(?:{_FOLDERS})/[\w./-]+|(?!~)[\w-]+/[\w./-]+\.(?:py|cpp|proto|sh)")
"""A path in the repository: from its root, or the name of a source in any folder."""


_FLAG = re.compile(r"(?<![\w-])--[a-z](?:[a-z-]*[a-z])?(?![\w*-])")
"""None of which only the beginning is said, as `--min-*`."""


def words_of_ours(text: str) -> list[str] | None:
    """[COMMAND, ...] of `twostroke COMMAND ...`, or of `COMMAND --flag`; None: it is not a command of ours."""
    words = text.split()
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    if len(words) > 1 and words[0].rpartition("/")[2] == "twostroke":
        return words[1:]
    if words[:3] == ["python", "-m", "tests.trials.bench"]:
        return words[3:]
    return words if words and words[0] in COMMANDS else None


@functools.cache
def flags_of(command: str) -> frozenset[str]:
    """Returns the flags of a command and of all its subcommands: `bench compare` has flags that `bench` has not."""
    if command == FAULTS:
        options.add_arguments(parser := argparse.ArgumentParser())
        return frozenset(_flags_below(parser))
    parser = (PROGRAM if command in COMMANDS else bench.PROGRAM).parser([command])
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return frozenset(_flags_below(subparsers.choices[command]))


def _flags_below(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _flags_below(below)
