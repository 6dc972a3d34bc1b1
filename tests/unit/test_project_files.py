"""The files that people look for are there, and say what is so."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_licence_is_the_one_that_the_package_names() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert (PROJECT["project"]["license"], PROJECT["project"]["license-files"]) == ("Apache-2.0", ["LICENSE"])


def test_paths_links_and_targets_of_the_guides_exist() -> None:
    for name in ("CONTRIBUTING.md", "SECURITY.md"):
        text = (ROOT / name).read_text()
        paths = re.findall(r"`((?:router|twostroke|tests|cluster|tools|docs)/[\w/.]*)`", text)
        links = re.findall(r"\]\((?!http)([^)#]+)", text)
        missing = [path for path in (*paths, *links) if not (ROOT / path).exists()]
        assert not missing, f"{name} names what is not there"
        targets = re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)
        assert all(re.search(rf"^{target}:", MAKEFILE, re.MULTILINE) for target in targets), targets


def test_hooks_before_a_commit_are_those_of_make_lint() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in local["hooks"]]
    assert all(entry.startswith(".venv/bin/") for entry in entries)
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    linted = [line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe[1].splitlines()]
    own = [entry.replace(" --force-exclude", "") for entry in entries]
    assert own == [line.replace(" --check", "") for line in linted]


def test_editors_break_lines_where_ruff_does() -> None:
    assert f"max_line_length = {PROJECT['tool']['ruff']['line-length']}" in (ROOT / ".editorconfig").read_text()


def test_no_tracked_file_lies_in_a_folder_that_is_ignored() -> None:
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert not subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
