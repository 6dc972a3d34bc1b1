"""The extra `tools`: no server needs its packages, and a command that does names it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tools.cli import PACKAGES

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in PACKAGES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

PACKAGES = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Missing())
"""
"""Begins a program in whose environment packages are missing."""
SERVER = """
import importlib

for name in ("router.__main__", "decode_worker.worker", "prefill_worker.worker", "cluster.commands.serving.serve",
             "cluster.launch.launcher", "cluster.supervisor.supervisor", "cluster.supervisor.actors"):
    importlib.import_module(name)
assert not PACKAGES & {name.partition(".")[0] for name in sys.modules}
"""


PARSERS = """
from tools.cli import PROGRAM

for name in PROGRAM.commands:
    try:
        PROGRAM.parser([name])
    except ModuleNotFoundError:
        print(name)
"""
"""Prints the commands that do not even have flags without the packages."""


MISSING = """
import contextlib, io, json
from tools.cli import main

sys.stdin.isatty = sys.stdout.isatty = lambda: True
for package, words in json.loads(sys.argv[1]):
    PACKAGES.clear()
    PACKAGES.add(package)
    assert package not in sys.modules
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(words)
    print(json.dumps([status, said.getvalue()]))
"""
"""Runs commands on a terminal, one after the other, each without one package."""


def without_packages(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + program, ",".join(PACKAGES), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_extra_brings_the_packages_that_its_commands_need() -> None:
    wanted = {
        re.split(r"[<>=]", line)[0].replace("-", "_") for line in PROJECT["project"]["optional-dependencies"]["tools"]
    }
    needed = {re.split(r"[<>=]", line)[0].replace("-", "_") for line in PROJECT["project"]["dependencies"]}
    assert wanted == PACKAGES
    assert not wanted & needed


def test_routers_workers_and_launchers_start_without_the_extra() -> None:
    done = without_packages(SERVER)
    assert done.returncode == 0, done.stderr


def test_every_other_command_says_its_flags_without_the_extra() -> None:
    done = without_packages(PARSERS)
    assert (done.returncode, done.stdout.split()) == (0, ["chat", "doctor"]), done.stderr


def test_what_is_missing_is_named_with_the_extra_that_brings_it() -> None:
    commands = {
        "matplotlib": ("bill", "--model", "paced:", "--html", "bill.html"),
        "aiohttp": ("bench", "--url", "http://127.0.0.1:9"),
        "prompt_toolkit": ("chat", "--http", "127.0.0.1:9"),
    }
    done = without_packages(MISSING, json.dumps(list(commands.items())))
    assert done.returncode == 0, done.stderr
    for package, line in zip(commands, done.stdout.splitlines(), strict=True):
        needed = f"this command needs {package}, which is not installed: pip install 'twostroke[tools]'"
        assert json.loads(line) == [2, f"twostroke: {needed}\n"]
