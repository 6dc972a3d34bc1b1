"""The bill against what runs: built workers, the cliff of a scheduler, and what the command prints."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.unit.engine.tiny import TINY, save_tiny
from tests.unit.models.family_configs import CONFIGS
from tests.unit.models.test_registry import SIZES, saved
from tests.unit.scheduler.bench import Bench
from tools.bill.bill import make_bill
from tools.bill.drafts import billed_draft
from tools.bill.measure import ComputeCost, TierCost, break_even_pages, disk_cost, host_cost
from tools.bill.options import BillFlags, DraftFlags, MachineFlags, MemoryFlags, ModelFlags, RequestFlags
from tools.bill.ranks import ranked
from tools.bill.report import groups_grid, render_page, tables
from tools.cli import main
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, ModelConfig, Role, ScheduleConfig, WorkerConfig
from twostroke.config.cache import KV_FORMATS
from twostroke.engine.build import build_runner
from twostroke.engine.drafts.build import build_draft
from twostroke.kv_cache.form import FORMS, Conversion
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.pool_size import PoolSize
from twostroke.models.memory_needs import HOST_PROCESS_BYTES, packed_weights
from twostroke.models.registry import read_spec
from twostroke.models.shares.share import shares_of
from twostroke.request import SamplingParams
from twostroke.scheduler.cost import StepCost
from twostroke.worker.tiers.opening import share_of

MIB = 1 << 20
PACED = "paced:page_bytes=65536,max_model_len=4096"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


def flags(model: str, *, memory: dict[str, Any] | None = None, **said: Any) -> BillFlags:
    return BillFlags(model=ModelFlags(model=model, **said), memory=MemoryFlags(**(memory or {})))


@pytest.mark.parametrize(("dtype", "block_size", "pool_bytes"), [("float32", 16, 100_000), ("float32", 32, 1 << 20)])
def test_pages_and_bytes_are_those_of_a_built_worker(tiny: Path, dtype: str, block_size: int, pool_bytes: int) -> None:
    cache = CacheConfig(block_size=block_size, kv_cache_memory_bytes=pool_bytes)
    config = WorkerConfig(
        role=Role.DECODE, worker_id="d", model=ModelConfig(model=str(tiny), dtype=dtype, device="cpu"), cache=cache
    )
    built = build_runner(config, tiny)
    memory = {"block_size": block_size, "kv_cache_memory_bytes": pool_bytes}
    bill = make_bill(flags(str(tiny), dtype=dtype, memory=memory))
    assert bill.chosen.size == PoolSize(built.model.pages, built.model.page_bytes, built.model.block_size)
    assert bill.chosen.pool_bytes == built.memory.total_bytes  # type: ignore[attr-defined]  # a worker on a CPU
    built.close()


def test_ranks_are_billed_one_by_one_and_beside_a_worker_that_computes_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    one = make_bill(flags(str(tmp_path))).model.plan
    bill = make_bill(flags(str(tmp_path), decode_tp=2))
    prefill, decode = (worker.plan for worker in ranked(bill.model))
    spec = read_spec(tmp_path)
    assert [each.weights for each in prefill.processes] == [packed_weights(spec, is_int8=False, with_head=False)]
    assert HOST_PROCESS_BYTES < prefill.working_bytes < one.working_bytes, "it draws nothing"
    shares = shares_of(spec, 2, None, is_int8=False)
    assert [rank.weights for rank in decode.processes] == [packed_weights(share, is_int8=False) for share in shares]
    assert bill.model.plan.weights.total == sum(rank.weights.total for rank in decode.processes)
    first, second = (rank.working_bytes for rank in decode.processes)
    assert HOST_PROCESS_BYTES < second < first < one.working_bytes
    together = first + second + decode.shared_bytes + bill.model.plan.weights.total
    more_mib = (together - one.weights.total - one.working_bytes) / MIB
    assert main(["bill", "--model", str(tmp_path), "--decode-tp", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"2 ranks of a decode worker take {more_mib:.1f} MiB more than one rank would" in said
    assert main(["bill", "--model", str(tmp_path), "--tp", "2", "--json", "-"]) == 0
    (every,) = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["working_bytes"] for rank in every["ranks"]] == [first, second]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_draft_model_is_billed_as_a_decode_worker_counts_it(
    tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, draft = saved_with_words(tmp_path / "model"), saved_with_words(tmp_path / "draft", layers=1)
    memory, schedule = {"kv_cache_memory_bytes": MIB}, ScheduleConfig(draft_model=str(draft), draft_cache_bytes=MIB)
    config = WorkerConfig(
        role=Role.DECODE,
        worker_id="d",
        model=ModelConfig(model=str(model), dtype=dtype, device="cpu"),
        cache=CacheConfig(**memory),
        schedule=schedule,
    )
    built = build_runner(config, model)
    drafting = build_draft(config, built)
    assert drafting is not None
    asked = DraftFlags(draft_model=str(draft), draft_cache_bytes=MIB)
    bill = make_bill(flags(str(model), dtype=dtype, memory=memory).replace(draft=asked))
    plan = billed_draft(bill.model)
    assert plan is not None
    counted = {use.part: use.billed_bytes for use in drafting.memory_use}
    assert counted == {"draft pages": plan.pool_bytes, "draft weights": plan.weights.total}
    assert plan.pages == drafting.pages
    without = make_bill(flags(str(model), dtype=dtype, memory=memory))
    assert bill.total_bytes - without.total_bytes == sum(counted.values())
    drafting.close()
    built.close()
    command = ["bill", "--model", str(model), "--dtype", dtype, "--kv-cache-memory", "1M"]
    assert (
        main([*command, "--draft-model", str(draft), "--draft-cache-memory", "1M", "--json", str(tmp_path / "j")]) == 0
    )
    shown, told = capsys.readouterr().out, json.loads((tmp_path / "j").read_text())
    assert re.search(rf"draft weights +{counted['draft weights']} ", shown)
    assert told["draft"]["pool_bytes"] == counted["draft pages"]


def test_a_draft_model_that_cannot_propose_is_not_billed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved_with_words(tmp_path / "model")
    refused = {
        "draws from 65 tokens and the model from": ["--draft-model", str(saved_with_words(tmp_path / "wide", size=65))],
        "differ in token 1 ": ["--draft-model", str(saved_with_words(tmp_path / "other", words=("a", "c")))],
        "is the model itself": ["--draft-model", str(model)],
        "no config.json": ["--draft-model", str(tmp_path)],
        "is not on this machine; run: twostroke model pull": ["--draft-model", "owner/model-that-is-not-here"],
        "--draft-cache-memory 5 holds 0 pages": [
            "--draft-model",
            str(saved_with_words(tmp_path / "draft", layers=1)),
            "--draft-cache-memory",
            "5",
        ],
        "bytes of weights in a step and the model": [
            "--draft-model",
            str(saved_with_words(tmp_path / "deep", layers=9)),
        ],
    }
    capsys.readouterr()
    for why, asked in refused.items():
        assert main(["bill", "--model", str(model), *asked]) == 2
        said = capsys.readouterr().err
        assert why in said
        assert said.count("\n") == 1


def saved_with_words(
    directory: Path, words: tuple[str, ...] = ("a", "b"), size: int = 64, layers: int = TINY.num_hidden_layers
) -> Path:
    """Saves a tiny model that draws from `size` tokens, with a tokenizer that names the first of them."""
    save_tiny(directory, TINY.from_dict(TINY.to_dict() | {"vocab_size": size, "num_hidden_layers": layers}))
    vocabulary = {word: number for number, word in enumerate(words)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return directory


def test_pages_of_window_layers_are_billed_apart_as_a_worker_keeps_them(tmp_path: Path) -> None:
    windowed, memory = save_tiny(tmp_path / "windowed", CONFIGS["gemma3"]), {"kv_cache_memory_bytes": 8 * MIB}
    bill = make_bill(flags(str(windowed), dtype="float32", memory=memory))
    model = ModelConfig(model=str(windowed), dtype="float32", device="cpu")
    built = build_runner(
        WorkerConfig(role=Role.DECODE, worker_id="d", model=model, cache=CacheConfig(**memory)), windowed
    )
    size = bill.chosen.size
    (further,) = size.further
    assert (size.pages, size.page_bytes) == (built.model.pages, built.model.page_bytes)
    assert (further.pages, further.page_bytes) == (
        built.model.further[0].pages,
        built.model.further[0].page_bytes,
    )
    assert bill.chosen.pool_bytes == built.model.layout.host_bytes
    assert size.pages > 8 * MIB // size.block_bytes > further.pages
    assert [group.window for group in bill.model.groups] == [None, 21]
    long, short = (size.request_bytes(tokens) for tokens in (160, 16))
    assert long == 10 * size.page_bytes + 4 * further.page_bytes
    assert short == size.block_bytes
    assert size.concurrent(160) == min(size.pages // 10, further.pages // 4)
    cache = CacheConfig(**memory, host_cache_bytes=4 * MIB)
    tiers = make_bill(flags(str(windowed), dtype="float32", memory=memory | {"host_cache_bytes": 4 * MIB})).chosen
    assert list(tiers.host) == [
        share_of(group, cache, built.model.layout).host_cache_bytes // built.model.layout.page_sizes[group]
        for group in GroupKind
    ]
    on_gpu = make_bill(flags(str(windowed), dtype="float32", memory=memory | {"device_memory_bytes": 4 << 30})).chosen
    assert on_gpu.size.request_bytes(160) == long
    built.close()


def test_pages_with_exact_layers_are_billed_beside_all_forms_and_by_their_parts(tmp_path: Path) -> None:
    deep = save_tiny(tmp_path / "deep", LlamaConfig(**TINY.to_diff_dict() | {"num_hidden_layers": 5}))
    said = {"kv_format": "int4", "kv_exact_layers": 1, "kv_cache_memory_bytes": MIB}
    config = WorkerConfig(
        role=Role.DECODE,
        worker_id="d",
        model=ModelConfig(model=str(deep), dtype="bfloat16", device="cpu"),
        cache=CacheConfig(**said),
    )
    built = build_runner(config, deep)
    bill = make_bill(flags(str(deep), memory=said))
    assert bill.chosen.size == PoolSize(built.model.pages, built.model.page_bytes, built.model.block_size)
    assert set(bill.forms) == {*FORMS, "int4+1xbfloat16"}
    rows = [[cell.text for cell in row.cells] for row in groups_grid(bill).rows]
    assert [row[-1] for row in rows[1:]] == ["64", "72", "64"], "bytes per token of the first, of three, of the last"
    assert rows[0][-1] == "200"
    assert [row[0] for row in rows[1:]] == [
        "layers 0 to 0 of them in bfloat16",
        "layers 1 to 3 of them in int4",
        "layers 4 to 4 of them in bfloat16",
    ]
    on_gpu = make_bill(flags(str(deep), memory=said | {"device_memory_bytes": 64 << 30}))
    assert on_gpu.chosen.size.page_bytes == built.model.page_bytes
    assert "int4+1xbfloat16" in render_page(bill)
    built.close()


def test_a_paced_worker_is_billed_too() -> None:
    cache = CacheConfig(kv_cache_memory_bytes=4 * MIB)
    built = build_runner(
        WorkerConfig(role=Role.DECODE, worker_id="d", model=ModelConfig(model=PACED), cache=cache), None
    )
    bill = make_bill(flags(PACED, memory={"kv_cache_memory_bytes": 4 * MIB}))
    assert bill.chosen.size == PoolSize(built.model.pages, built.model.page_bytes, 16)
    assert "holds 1024 tokens (64 pages of 16)" in bill.advice()[0]
    assert bill.advice()[0] == built.model.advice
    built.close()


def test_smaller_forms_hold_more_and_every_form_is_billed(tiny: Path) -> None:
    bill = make_bill(flags(str(tiny), memory={"kv_cache_memory_bytes": MIB}))
    assert set(bill.forms) == set(FORMS)
    pages = {name: form.size.pages for name, form in bill.forms.items()}
    assert pages["float32"] < pages["bfloat16"] < pages["int8"] < pages["int4"]
    assert all(form.size.pages == MIB // form.size.page_bytes for form in bill.forms.values())


def test_mixed_forms_are_billed_as_a_prefill_worker_holds_and_sends_them(tiny: Path) -> None:
    cache = CacheConfig(kv_cache_memory_bytes=MIB, decode_kv_format="int8")
    config = WorkerConfig(
        role=Role.PREFILL,
        worker_id="p",
        model=ModelConfig(model=str(tiny), dtype="bfloat16", device="cpu"),
        cache=cache,
    )
    built = build_runner(config, tiny)
    bill = make_bill(flags(str(tiny), memory={"kv_cache_memory_bytes": MIB}))
    int8 = next(mixed for mixed in bill.mixed if mixed.form == "int8")
    assert built.model.conversion is not None
    assert (int8.prefill_pages, int8.sent_page_bytes) == (built.model.pages, built.model.conversion.page_bytes)
    assert int8.conversion_s is None
    assert {mixed.form for mixed in bill.mixed} == set(KV_FORMATS) - {"bfloat16"}
    assert not make_bill(flags(PACED)).mixed
    built.close()


def test_different_numbers_of_ranks_are_billed_as_a_prefill_worker_holds_regrouped_pages(tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    memory = {"kv_cache_memory_bytes": MIB}
    model = ModelConfig(model=str(tmp_path), dtype="bfloat16", device="cpu", decode_tp=2)
    config = WorkerConfig(role=Role.PREFILL, worker_id="p", model=model, cache=CacheConfig(**memory))
    built = build_runner(config, tmp_path)
    bill = make_bill(flags(str(tmp_path), decode_tp=2, memory=memory))
    rows = {mixed.form: mixed for mixed in bill.mixed}
    regrouped = rows["bfloat16/2"]
    assert built.model.conversion is not None
    assert (regrouped.prefill_pages, regrouped.sent_page_bytes) == (
        built.model.pages,
        built.model.conversion.page_bytes,
    )
    assert regrouped.prefill_pages == bill.chosen.size.pages // 2
    served = set(KV_FORMATS) - {"int4"}  # heads of 16 numbers are too small for it
    assert set(rows) == {f"{form}/2" for form in served}
    title, _ = next((title, grid) for title, grid in tables(bill) if "another form" in title)
    assert title.startswith("Prefill workers with bfloat16,")
    alike = make_bill(flags(str(tmp_path), tp=2, memory=memory))
    assert {mixed.form for mixed in alike.mixed} == {f"{form}/2" for form in served - {"bfloat16"}}
    built.close()


def test_a_config_alone_is_enough(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((tiny / "config.json").read_text())
    memory = {"kv_cache_memory_bytes": MIB}
    assert (
        make_bill(flags(str(tmp_path / "bare"), memory=memory)).forms
        == make_bill(flags(str(tiny), memory=memory)).forms
    )


@pytest.mark.parametrize(("prompt", "output"), [(30, 34), (61, 3), (4, 60)])
def test_preemption_begins_with_one_request_more_than_the_bill_says(prompt: int, output: int) -> None:
    """All of them arrive together, differ from the first token on, and grow to the same length."""
    pages = 120
    fit = PoolSize(pages, 1, 4).concurrent(prompt + output)

    def preempts(requests: int) -> bool:
        bench = Bench(pages, max_num_seqs=100, max_num_batched_tokens=4000)
        params = SamplingParams(seed=0, max_tokens=output, ignore_eos=True)
        sequences = [bench.answer([100 + number] * prompt, params) for number in range(requests)]
        waited = len(bench.admit()) < requests
        finished = 0
        while finished < requests:
            finished += sum(emission.finish is not None for emission in bench.step())
            bench.admit()
        return waited or any(sequence.preemptions for sequence in sequences)

    first = next(count for count in itertools.count(1) if preempts(count))
    assert abs(first - (fit + 1)) <= 1
    assert not preempts(fit)


def test_loading_pays_from_where_the_lines_cross() -> None:
    compute = ComputeCost(StepCost(prompt_step_s=0.01, prompt_token_s=0.001), step_tokens=128, block_size=16)
    assert break_even_pages(TierCost("disk", 0.2, 0.001), compute, 1000) == 12
    slow = TierCost("disk", 0.1, 0.1)
    assert break_even_pages(slow, compute, 1000) is None, "a disk that takes 100 ms per page never pays"
    for pages in range(1, 100):
        loads = TierCost("disk", 0.2, 0.001).load_s(pages) < compute.compute_s(pages)
        assert loads == (pages >= 12), pages


def test_copies_are_measured_and_leave_no_file(tmp_path: Path) -> None:
    disk, host = disk_cost(tmp_path, 3 * MIB + 5), host_cost(3 * MIB + 5)
    assert not list(tmp_path.iterdir())
    for cost in (disk, host):
        assert 0 < cost.page_s < 10
        assert 0 < cost.first_s < 10


def test_measuring_gives_every_tier_a_price_and_a_break_even(tiny: Path, tmp_path: Path) -> None:
    said = BillFlags(
        model=ModelFlags(model=str(tiny), dtype="float32"),
        memory=MemoryFlags(kv_cache_memory_bytes=MIB),
        machine=MachineFlags(measure=True, disk_cache_dir=str(tmp_path), bandwidth=10.0),
    )
    bill = make_bill(said)
    assert bill.measured is not None
    assert bill.measured.compute is not None
    assert bill.measured.compute.compute_s(2) > 0
    assert [tier.tier for tier in bill.measured.tiers] == ["host", "disk"]
    assert all(mixed.conversion_s for mixed in bill.mixed)


@pytest.mark.parametrize("attention_bias", [False, True])
def test_conversions_are_timed_with_the_centers_that_keys_of_the_model_have(
    tmp_path: Path, attention_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[Conversion] = []

    def note(conversion: Conversion) -> float:
        timed.append(conversion)
        return 1.0

    monkeypatch.setattr("twostroke.worker.page_forms.page_converter.time_of_a_conversion", note)
    config = LlamaConfig(**{**TINY.to_dict(), "attention_bias": attention_bias})
    model = save_tiny(tmp_path / "tiny", config)
    machine = MachineFlags(measure=True, disk_cache_dir=str(tmp_path), bandwidth=10.0)
    memory = MemoryFlags(kv_cache_memory_bytes=MIB)
    make_bill(BillFlags(model=ModelFlags(model=str(model), dtype="float32"), memory=memory, machine=machine))
    assert len(timed) == len(KV_FORMATS) - 1
    assert all((conversion.key_centers is not None) == attention_bias for conversion in timed)


def test_the_ceiling_is_bandwidth_over_what_a_step_reads(tiny: Path) -> None:
    bill = make_bill(flags(str(tiny), memory={"kv_cache_memory_bytes": MIB}))
    form = bill.chosen
    read = bill.model.plan.weights.step + 3 * 100 * form.size.page_bytes / 16
    rate = form.ceiling(1e9, 3, 100)
    assert rate is not None
    assert math.isclose(rate, 3e9 / read)


def write_log(path: Path, requests: int = 40) -> Path:
    """Writes Mooncake's format: two turns of many chats over one beginning."""
    lines = []
    for at in range(requests):
        chat = at % (requests // 2)
        ids = [0, 10 + chat] + ([1000 + chat] if at >= requests // 2 else [])
        row = {"timestamp": 1000 * at, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_log_gives_tables_a_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_log(tmp_path / "trace.jsonl")
    page, numbers = tmp_path / "bill.html", tmp_path / "bill.json"
    command = ["bill", "--model", PACED, "--trace", str(trace), "--html", str(page), "--json", str(numbers)]
    assert main([*command, "--host-cache", "8M", "--disk-cache", "1G", "--kv-cache-memory", "6M"]) == 0
    printed = capsys.readouterr().out
    for words in ("Pages by form", "Hit rate by capacity", "optimum", "+ disk"):
        assert words in printed
    said = json.loads(numbers.read_text())
    rates = [point["lru"] for point in said["forms"]["bfloat16"]["hit_rates"]]
    assert rates == sorted(rates)
    assert rates[-1] == said["log"]["most"] == pytest.approx((19 + 20 * 2) / (20 * 2 + 20 * 3))
    assert all(point["lru"] <= point["optimum"] for point in said["log"]["curve"])
    html = page.read_text()
    assert "<svg" in html
    assert not re.findall(r"""(?:src|href)\s*=\s*"(?!#)|url\((?!#)|@import""", html), "the page fetches nothing"


def test_lengths_of_a_log_say_how_many_of_its_requests_fit(tmp_path: Path) -> None:
    trace = write_log(tmp_path / "trace.jsonl")
    said = BillFlags(
        model=ModelFlags(model=PACED),
        memory=MemoryFlags(kv_cache_memory_bytes=64 * MIB),
        requests=RequestFlags(trace=str(trace)),
    )
    bill = make_bill(said)
    assert bill.log is not None
    spread = bill.log.spread(16)
    assert spread.mean_pages == pytest.approx((65 + 97) / 2)
    assert bill.chosen.size.concurrent_of(spread) == 1024 // 81


def test_what_a_worker_refuses_the_bill_refuses_with_the_same_words(tiny: Path) -> None:
    config = WorkerConfig(
        role=Role.DECODE,
        worker_id="d",
        model=ModelConfig(model=str(tiny), dtype="float32", device="cpu", max_model_len=100),
        cache=CacheConfig(kv_cache_memory_bytes=20_000),
    )
    with pytest.raises(ConfigError) as refused:
        build_runner(config, tiny)
    with pytest.raises(ConfigError) as billed:
        make_bill(flags(str(tiny), dtype="float32", max_model_len=100, memory={"kv_cache_memory_bytes": 20_000}))
    assert billed.value.message == refused.value.message
    assert "use --kv-cache-memory 28672" in billed.value.message


def test_a_gpu_is_billed_as_a_worker_there_counts(tiny: Path) -> None:
    bill = make_bill(flags(str(tiny), memory={"device_memory_bytes": 8 << 30}))
    share = int(0.9 * (8 << 30)) - bill.model.plan.weights.total - bill.model.plan.working_bytes
    assert bill.chosen.size.pages == share // bill.chosen.size.page_bytes - 1
    with pytest.raises(ConfigError, match="bytes too small: weights take"):
        make_bill(flags(str(tiny), memory={"device_memory_bytes": 1 << 30}))


@pytest.mark.parametrize("weights", ["model", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_real_worker_takes_what_was_billed_within_one_percent(smollm2_dir: Path, weights: str) -> None:
    memory = {"kv_cache_memory_bytes": 64 * MIB}
    config = WorkerConfig(
        role=Role.DECODE,
        worker_id="d",
        model=ModelConfig(weights=weights, device="cpu"),
        cache=CacheConfig(**memory),
    )
    built = build_runner(config, smollm2_dir)
    uses = {use.part: use for use in built.memory_use}
    bill = make_bill(flags(str(smollm2_dir), weights=weights, memory=memory))
    assert bill.chosen.size.pages == built.model.pages
    assert uses["pages"].measured_bytes == pytest.approx(bill.chosen.pool_bytes, rel=0.01)
    assert uses["weights"].billed_bytes == bill.model.plan.weights.total
    if uses["weights"].measured_bytes is not None:  # else this machine gave no large pages, and the weights are private
        assert uses["weights"].measured_bytes == pytest.approx(bill.model.plan.weights.total, rel=0.01)
    built.close()
