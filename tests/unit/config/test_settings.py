"""A setting is declared once: flag, cluster file, JSON, errors and the docs' table follow from the field."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.file.cluster import leaves
from twostroke.base.errors import ConfigError
from twostroke.config import ClusterConfig, RouterCommand, RouterConfig, Settings, WorkerConfig, flags, group, setting
from twostroke.config.leaves import leaves_of
from twostroke.config.settings import declared, setting_of
from twostroke.config.table import page

ROOT = Path(__file__).parents[3]


class CacheSettings(Settings):
    share: float = setting(0.5, above=0, most=1, unit="SHARE", help="share of the memory")
    keep_s: float | None = setting(None, least=0, help="how long pages are kept", default_text="for ever")
    names: tuple[str, ...] = setting((), flag="--name", help="a name", default_text="none")
    kind: str = setting("lru", choices=("lru", "fifo"), help="what goes first")
    is_shared: bool = setting(False, help="all may use it")


class Whole(Settings):
    count: int = setting(1, section="fleet", least=0, zero="none at all", help="how many there are")
    cache: CacheSettings = group(CacheSettings, "cache")


def read(*words: str) -> Whole:
    parser = argparse.ArgumentParser()
    flags.add(parser, Whole)
    return flags.read(Whole, parser.parse_args(words))


def test_a_field_is_a_flag_and_a_key_and_travels_as_json() -> None:
    whole = read("--share", "1", "--keep", "2.5", "--name", "a", "--name", "b", "--is-shared", "--count", "3")
    cache = CacheSettings(share=1.0, keep_s=2.5, names=("a", "b"), is_shared=True)
    assert whole == Whole(count=3, cache=cache) == Whole.from_json(whole.to_json())
    assert read() == Whole()
    assert [leaf.key for leaf in leaves_of(Whole)] == [
        "fleet.count", "cache.share", "cache.keep", "cache.name", "cache.kind", "cache.is_shared",
    ]  # fmt: skip


class Copy(Settings):
    count: int = setting_of(Whole, "count", default=7, help="how many are copied")
    share: float = setting_of(CacheSettings, "share")
    names: tuple[str, ...] = setting_of(CacheSettings, "names")


def test_a_setting_of_another_class_is_that_one_but_for_what_is_said() -> None:
    copied = declared(Copy)
    assert copied["share"] == declared(CacheSettings)["share"]
    assert copied["names"] == declared(CacheSettings)["names"]
    assert copied["count"] == dataclasses.replace(declared(Whole)["count"], help="how many are copied")
    assert Copy() == Copy(count=7, share=0.5, names=()) == Copy.from_json('{"names": []}')
    with pytest.raises(ConfigError, match="--count must be 0"):
        Copy(count=-1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--share", "0"), "--share must be more than 0 and at most 1, got 0.0"),
        (("--share", "nan"), "--share must be more than 0 and at most 1, got nan"),
        (("--keep", "-1"), "--keep must be 0 or more, got -1.0"),
        (("--count", "-1"), "--count must be 0 (none at all) or more, got -1"),
    ],
)
def test_a_value_beyond_its_bounds_is_refused_by_its_flag(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(*words)
    assert refused.value.message == said
    assert refused.value.field == words[0]


def test_settings_are_frozen_and_a_change_is_checked_anew() -> None:
    whole = Whole()
    assert whole.replace(count=4) == Whole(count=4)
    with pytest.raises(ConfigError, match="--count must be"):
        whole.replace(count=-1)
    with pytest.raises(ConfigError, match="Whole has no setting coun; known are count, cache"):
        whole.replace(coun=1)
    with pytest.raises(ValidationError, match="frozen"):
        whole.count = 2


@pytest.mark.parametrize("kind", [ClusterConfig, RouterCommand])
def test_every_default_is_within_its_bounds_and_no_two_settings_share_a_flag_or_a_key(kind: type[Settings]) -> None:
    leaves = leaves_of(kind)
    assert [leaf.flag for leaf in leaves if leaf.setting.refuses(leaf.declared_default)] == []
    for names in ([leaf.flag for leaf in leaves], [leaf.key for leaf in leaves]):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", [ClusterConfig, RouterCommand, RouterConfig, WorkerConfig])
def test_what_is_not_given_is_explained(kind: type[Settings]) -> None:
    """An empty default says nothing by itself."""
    silent = [leaf.flag for leaf in leaves_of(kind) if leaf.default_text is None and not leaf.is_required]
    assert [flag for flag in silent if "tls" not in flag] == []


def test_a_file_has_a_key_for_every_flag() -> None:
    assert {leaf.flag for leaf in leaves().values()} == {leaf.flag for leaf in leaves_of(ClusterConfig)}


def test_hidden_settings_have_bounds_and_no_flags() -> None:
    assert declared(WorkerConfig)["pull_timeout_s"].is_hidden
    with pytest.raises(ConfigError, match=r"RouterConfig.worker_wait_s must be positive and finite, got 0.0"):
        RouterConfig(worker_wait_s=0.0)


def test_the_docs_have_the_table_of_today() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == page(), "make settings"


def test_settings_load_neither_torch_nor_ray() -> None:
    code = (
        "import sys, twostroke.config, twostroke.config.table; print([m for m in ('torch', 'ray') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "[]\n"


def test_commands_that_only_ask_a_server_load_no_settings() -> None:
    code = (
        "import sys, cluster.commands.looking.status, cluster.commands.changing.drain; print('pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"
