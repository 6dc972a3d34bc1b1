"""Whole comparisons against a small server on a real socket, and the flags that ask for them."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import socket
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tools.bench import run
from tools.bench.compare import rounds
from tools.bench.compare.options import CompareOptions, options_from
from tools.bench.connect import connect
from twostroke.base.errors import ConfigError, PeerLost


@pytest.fixture
def compare_options(arguments: Any) -> Any:
    return lambda *flags: options_from(arguments("compare", *flags))


class Links(HTMLParser):
    """What a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]


async def compared(arguments: Any, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "compare.json"
    status = await asyncio.to_thread(run, arguments("compare", *flags, "--json", str(out)))
    return status, json.loads(out.read_text())


async def compared_and_drawn(arguments: Any, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """With the page, whose figures take longer to draw than the runs."""
    page = tmp_path / "compare.html"
    return *await compared(arguments, tmp_path, *flags, "--html", str(page)), page.read_text()


async def test_two_endpoints_get_the_same_prompts_in_turns_and_end_in_ratios(
    openai_server: Any, arguments: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = openai_server.url.replace("127.0.0.1", "localhost")
    flags = ("--names", "ours,theirs", "--load", "8x4@c2x3", "--load", "shared:16/8x4x2", "--rounds", "2")
    status, found, page = await compared_and_drawn(arguments, tmp_path, openai_server.url, other, *flags)
    assert status == 0
    prompts = Counter(tuple(body["prompt"]) for body in openai_server.bodies if body["max_tokens"] == 4)
    measured = 2 * (3 + 2 * 2)
    warming = 2 * 3
    assert Counter(prompts.values()) == {2: measured + warming}, "each prompt once per endpoint, and never again"
    assert [each["load"] for each in found["loads"]] == [
        "8x4@c2x3",
        "shared:16/8x4x2 cold",
        "shared:16/8x4x2 warm",
    ]
    assert [(each["round"], each["endpoint"]) for each in found["runs"]][:2] == [(0, "ours"), (0, "theirs")]
    ratios = found["loads"][0]["endpoints"]["theirs"]["ratios"]
    assert len(ratios["ttft_p50_s"]["rounds"]) == 2
    assert ratios["ttft_p50_s"]["min"] <= ratios["ttft_p50_s"]["median"] <= ratios["ttft_p50_s"]["max"]
    assert found["loads"][0]["endpoints"]["ours"]["ratios"] == {}
    printed = capsys.readouterr()
    assert re.search(r"theirs / ours +\d+\.\d\dx", printed.out)
    assert "12/12 round 2" in printed.err
    links = Links()
    links.feed(page)
    assert all(link.startswith("#") for link in links.fetched), "shapes of the page itself"
    assert (links.tags["script"], links.tags["link"], links.tags["svg"]) == (0, 0, 3 * 4)
    assert "prefers-color-scheme: dark" in page


async def test_grpc_and_http_may_be_compared(
    openai_server: Any, grpc_server: Any, arguments: Any, tmp_path: Path
) -> None:
    flags = ("--load", "8x4@c1x3", "--rounds", "1", "--warmup", "0", "--baseline", "ours")
    ours = f"grpc://{grpc_server.address},name=ours"
    status, found = await compared(arguments, tmp_path, f"{openai_server.url},name=other", ours, *flags)
    assert status == 0
    over_http = [body["prompt"] for body in openai_server.bodies if body["max_tokens"] == 4]
    over_grpc = [list(each.token_ids.ids) for each in grpc_server.requests if each.stop.max_tokens == 4]
    assert over_http == over_grpc
    assert [name for name, each in found["loads"][0]["endpoints"].items() if each["ratios"]] == ["other"]


async def test_an_endpoint_given_twice_gets_prompts_of_its_own(
    openai_server: Any, arguments: Any, tmp_path: Path
) -> None:
    flags = ("--load", "8x4@c1x3", "--rounds", "2", "--warmup", "0")
    _, found = await compared(arguments, tmp_path, openai_server.url, f"{openai_server.url}/v1", *flags)
    prompts = Counter(tuple(body["prompt"]) for body in openai_server.bodies if body["max_tokens"] == 4)
    assert set(prompts.values()) == {1}
    assert len(prompts) == 2 * 2 * 3
    first, second = (each["name"] for each in found["endpoints"])
    assert second == f"{first}#2"


async def test_each_endpoint_is_asked_in_its_own_way_and_its_quirks_are_noted(
    openai_server: Any, arguments: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = f"{openai_server.url},name=<odd>,model=double,text,no-ignore-eos,api-key=hidden"
    flags = ("--load", "8x8@c1x2", "--rounds", "1", "--warmup", "0")
    status, found, page = await compared_and_drawn(arguments, tmp_path, openai_server.url, odd, *flags)
    assert status == 0
    asked = {body["model"]: body for body in openai_server.bodies}
    assert isinstance(asked["steady"]["prompt"], list)
    assert isinstance(asked["double"]["prompt"], str)
    assert ("ignore_eos" in asked["steady"], "ignore_eos" in asked["double"]) == (True, False)
    (note,) = [note for note in found["notes"] if "2.00 tokens into an event" in note]
    assert note.startswith("<odd>: ")
    assert note in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    assert "&lt;odd&gt;" in page
    assert "<odd>" not in page
    assert "hidden" not in json.dumps(found) + page


async def test_a_run_without_an_answer_is_told_and_is_status_1(
    openai_server: Any, arguments: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The probe gets through, the burst does not."""
    narrow = f"{openai_server.url},name=b,model=cut"
    flags = ("--load", "8x8@c1x2", "--rounds", "1", "--warmup", "0")
    status, found, page = await compared_and_drawn(arguments, tmp_path, f"{openai_server.url},name=a", narrow, *flags)
    assert status == 1
    assert found["loads"][0]["endpoints"]["b"]["values"]["failed"]["rounds"] == [2.0]
    assert "b: incomplete" in capsys.readouterr().out
    assert "failed: incomplete" in page


async def test_a_server_that_refuses_token_ids_is_refused_with_advice(openai_server: Any, arguments: Any) -> None:
    asked = arguments("compare", f"{openai_server.url},model=no-ids", "--load", "8x8@c1x2")
    with pytest.raises(ConfigError, match=r"prompt must be a string.*URL,text"):
        await asyncio.to_thread(run, asked)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_server_that_is_not_there_is_waited_for_and_then_named(arguments: Any) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(PeerLost, match=f"no server at {url}"):
        run(arguments("compare", url, "--wait", "0.1"))


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["127.0.0.1:8000"], "url"),
        (["http://a,txt"], "urls"),
        (["http://a,colour=red"], "urls"),
        (["grpc://nowhere"], "grpc"),
        (["http://a", "http://b", "--names", "x"], "names"),
        (["http://a", "http://b", "--names", "x,x"], "names"),
        (["http://a", "--baseline", "b"], "baseline"),
        (["http://a", "--wait", "-1"], "wait"),
        (["http://a", "--seed", "-1"], "seed"),
        (["http://a", "--vocab-size", "3"], "vocab_size"),
        (["http://a", "--timeout", "0"], "timeout"),
        (["http://a", "--load", "long"], "load"),
        (["http://a", "--load", "8x8@c1", "--load", "8x8@c1"], "load"),
        (["http://a", "--rounds", "0"], "rounds"),
        (["http://a", "--warmup", "-1"], "warmup"),
        (["http://a", "--html", "-"], "html"),
        (["http://a", "--html", "/no/such/directory/report.html"], "html"),
        (["http://a", "--json", "/tmp"], "json"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(compare_options: Any, flags: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compare_options(*flags)
    assert str(caught.value.field).removeprefix("--").replace("-", "_") == field


def test_a_seed_is_drawn_unless_it_is_given(compare_options: Any) -> None:
    drawn: list[CompareOptions] = [compare_options("http://a") for _ in range(4)]
    assert len({options.endpoints.seed for options in drawn}) > 1
    assert compare_options("http://a", "--seed", "5").endpoints.seed == 5


def test_bench_without_a_command_is_still_one_run(arguments: Any) -> None:
    args: argparse.Namespace = arguments("--prompt-tokens", "9")
    assert args.prompt_tokens == 9
    with pytest.raises(ConfigError, match="--num-requests"):
        run(arguments("--num-requests", "0"))


@pytest.mark.parametrize("ended", [1, 3])
async def test_an_interrupted_comparison_reports_what_it_has_measured(
    ended: int,
    openai_server: Any,
    arguments: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = itertools.count()

    async def interrupted(*arguments: Any) -> Any:
        if next(begun) == ended:
            raise KeyboardInterrupt
        return await connect(*arguments)

    monkeypatch.setattr(rounds, "connect", interrupted)
    out, page = tmp_path / "compare.json", tmp_path / "compare.html"
    urls = (f"{openai_server.url},name=a", f"{openai_server.url},name=b")
    flags = ("--load", "8x4@c1x3", "--rounds", "2", "--warmup", "0", "--json", str(out), "--html", str(page))
    parsed = arguments("compare", *urls, *flags)
    caught: list[BaseException] = []

    def work() -> None:
        """In a thread of its own, out of which no interrupt comes."""
        try:
            run(parsed)
        except KeyboardInterrupt as error:
            caught.append(error)

    await asyncio.to_thread(work)
    assert caught, "the exit status is still that of an interrupted command"
    found = json.loads(out.read_text())
    assert (len(found["runs"]), found["missing_runs"]) == (ended, 4 - ended)
    printed = capsys.readouterr()
    assert f"Interrupted: {4 - ended} of 4 runs are missing." in printed.out.replace("\n", " ")
    assert f"interrupted after {ended} of 4 runs" in printed.err
    assert "<svg" in page.read_text()
