"""`twostroke keys`: what it prints, what it keeps, what routers make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.auth.api_keys import find_key, parse_keys
from tools.cli import main
from twostroke.base.errors import InvalidApiKey


def add(file: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["keys", "add", "--file", str(file), *flags]) == 0
    return capsys.readouterr().out.strip()


def test_a_key_is_shown_once_and_only_its_hash_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "5000", "--concurrency", "4", "--expires", "90d")
    limits += ("--max-priority", "7")
    first, second = add(file, capsys, "--tenant", "acme", *limits), add(file, capsys, "--tenant", "other")
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    assert first.rpartition("-")[2] not in text
    keys = parse_keys(text, str(file)).keys
    key_id, entry = find_key(keys, f"Bearer {first}", 0.0)
    assert (entry.tenant, entry.requests_per_minute, entry.tokens_per_minute, entry.concurrency) == (
        "acme",
        60,
        5000,
        4,
    )
    assert entry.expires is not None
    assert [find_key(keys, f"Bearer {key}", 0.0)[1].max_priority for key in (first, second)] == [7, 0]

    assert main(["keys", "revoke", key_id, "--file", str(file)]) == 0
    keys = parse_keys(file.read_text(), str(file)).keys
    with pytest.raises(InvalidApiKey, match="revoked"):
        find_key(keys, f"Bearer {first}", 0.0)
    assert find_key(keys, f"Bearer {second}", 0.0)[1].tenant == "other"
    capsys.readouterr()

    assert main(["keys", "list", "--json", "--file", str(file)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(each["tenant"], each["disabled"]) for each in shown.values()] == [("acme", True), ("other", False)]
    assert main(["keys", "list", "--file", str(file)]) == 0
    printed = capsys.readouterr().out
    assert [word in printed for word in ("acme", "revoked", "good", entry.sha256)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["add", "--tenant", "t", "--expires", "soon"], "expires must be a date"),
        (["add", "--tenant", "t", "--expires", "2020-01-01"], "--expires 2020-01-01 is over"),
        (["add", "--tenant", "t", "--concurrency", "0"], "--concurrency must be positive"),
        (["add", "--tenant", "t", "--requests-per-minute", "nan"], "--requests-per-minute must be positive"),
        (["add", "--tenant", ""], "--tenant must be printable"),
        (["add", "--tenant", "t", "--max-priority", "101"], "--max-priority must be from -100 to 100"),
        (["revoke", "0123456789ab"], "has no key '0123456789ab'"),
        (["list"], "sha256 must be 64 hexadecimal digits"),
    ],
)
def test_what_cannot_be_is_one_line_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    file = tmp_path / "keys.yaml"
    before = "keys: {a: {tenant: t, sha256: x}}" if arguments == ["list"] else "keys: {}"
    file.write_text(before)
    assert main(["keys", *arguments, "--file", str(file)]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1
    assert file.read_text() == before


@pytest.mark.parametrize("file", ["/proc/keys.yaml", "/dev/null/keys.yaml", "/"])
def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], file: str) -> None:
    assert main(["keys", "add", "--tenant", "t", "--file", file]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"twostroke: --file {file}")
    assert (told.err.count("\n"), told.out) == (1, "")


@pytest.mark.parametrize("action", [["list"], ["revoke", "a"], ["add", "--tenant", "t"]])
def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], action: list[str]) -> None:
    assert main(["keys", *action, "--file", "/no/such/folder/keys.yaml"]) == 2
    assert "--file /no/such/folder/keys.yaml" in capsys.readouterr().err


def test_a_server_whose_key_file_is_broken_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("keys: {a: {tenant: t}}")
    assert main(["serve", "--http-port", "0", "--grpc-port", "0", "--model", "paced:", "--api-keys", str(file)]) == 2
    assert f"--api-keys {file}: KeyFile.keys['a'] needs ['sha256']" in capsys.readouterr().err
