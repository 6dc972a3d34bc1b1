"""`twostroke console` prints the console's address with the operator's key, which is made of the cluster's token."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest

from cluster.commands.looking import console
from router.auth.api_keys import operator_key
from tests.unit.router.conftest import open_frontend
from twostroke.base.credentials import TOKEN_VARIABLE
from twostroke.base.errors import ConfigError
from twostroke.config import EndpointsConfig

TOKEN = "0123456789abcdef"


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    console.add_arguments(parser)
    return parser.parse_args(words)


async def test_the_address_is_of_the_routers_port_for_clients_with_the_key_behind_the_fragment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv(TOKEN_VARIABLE, str(tmp_path / "token"))
    async with open_frontend(EndpointsConfig(), cluster_token=TOKEN) as frontend:
        for flags, scheme in (((), "http"), (("--tls",), "https")):
            args = arguments("--admin", frontend.admin_address, *flags)
            assert await asyncio.to_thread(console.run, args) == 0
            host = frontend.url.removeprefix("http://")
            assert capsys.readouterr().out == f"{scheme}://{host}/console#key={operator_key(TOKEN)}\n"
        assert await asyncio.to_thread(console.run, arguments("--admin", frontend.admin_address, "--key")) == 0
        assert capsys.readouterr().out == f"{operator_key(TOKEN)}\n"


def test_without_the_clusters_token_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="cluster's token"):
        console.run(arguments("--admin", "127.0.0.1:1"))
