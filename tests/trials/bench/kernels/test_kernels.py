"""`tests.trials.bench kernels`: what counts as work and as its least time, and a whole run over a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.trials.bench.kernels import run, session
from tests.trials.bench.kernels.bench_attention import Span, attention_work
from tests.trials.bench.kernels.bench_experts import QWEN3, bench_experts
from tests.trials.bench.kernels.bench_latents import bench_latents
from tests.trials.bench.kernels.bench_linear import products_of
from tests.trials.bench.kernels.bench_step import step_work
from tests.trials.bench.kernels.options import options_from
from tests.trials.bench.kernels.session import higher
from tests.trials.bench.kernels.setting import Setting, setting_of
from tests.trials.bench.kernels.timing import Result, Timed, Work, timed
from tests.unit.kernels.variants import IN_GATE
from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig
from twostroke.kernels.cpu.variants import OVERRIDE
from twostroke.kernels.limits import Limits
from twostroke.models.registry import read_spec

TINY = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    max_position_embeddings=2048,
    eos_token_id=2,
)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(TINY).save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "tokenizer.json").write_text("{}")
    return tmp_path / "tiny"


@pytest.fixture
def setting(tiny: Path) -> Setting:
    model = ModelConfig(model=str(tiny), dtype="bfloat16")
    return Setting(model=model, model_dir=tiny, spec=read_spec(tiny), threads=1, repeats=1, kernels=None, team=None)


def test_the_least_time_is_that_of_the_narrower_limit() -> None:
    limits = Limits(1, read_bytes_per_s=10.0, operations_per_s=100.0)
    assert Work(bytes=20, operations=100).least_s(limits) == 2.0
    assert Work(bytes=20, operations=500).least_s(limits) == 5.0
    result = Result("step", "", "torch", 1, Work(20, 100), Timed(4.0, 3.0, 9.0))
    assert result.share(limits) == 0.5
    assert result.share(higher(limits, Limits(1, 20.0, 50.0))) == 0.25, "what was reached once can be reached"


def test_a_timing_leaves_out_the_first_call_and_divides_by_what_one_call_does() -> None:
    calls: list[int] = []
    found = timed(lambda: calls.append(len(calls)), repeats=4, per_call=1000)
    assert calls == [0, 1, 2, 3, 4]
    assert 0 < found.least_s <= found.median_s <= found.most_s


def test_the_work_of_attention_counts_every_key_once_and_every_pair_of_tokens(setting: Setting) -> None:
    token_bytes = 2 * 2 * 8 * 2
    decode = attention_work(setting, Span(3, 1, 100), "bfloat16")
    assert decode == Work(bytes=2 * 3 * 100 * token_bytes, operations=2 * 3 * 100 * 4 * 8 * 4)
    whole = attention_work(setting, Span(1, 4, 4), "bfloat16")
    assert whole.operations == 2 * (1 + 2 + 3 + 4) * 4 * 8 * 4
    split = [attention_work(setting, Span(1, 2, end), "bfloat16").operations for end in (2, 4)]
    assert sum(split) == whole.operations, "chunks compute together what one pass computes"


def test_a_step_reads_all_weights_but_the_embedding(setting: Setting) -> None:
    parameters = {name: outputs * inputs for name, (outputs, inputs) in products_of(setting.spec).items()}
    counted = AutoModelForCausalLM.from_config(TINY)
    matrices = sum(each.numel() for each in counted.parameters() if each.dim() == 2) - 64 * 32
    assert 2 * (sum(parameters.values()) - parameters["head"]) + parameters["head"] == matrices
    work = step_work(setting, Span(3, 1, 100))
    assert work.bytes == matrices * 2 + attention_work(setting, Span(3, 1, 100), "bfloat16").bytes


@pytest.mark.slow
def test_every_part_is_timed_with_every_choice_of_kernels(
    arguments: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setenv(OVERRIDE, IN_GATE[0])
    out = tmp_path / "kernels.json"
    flags = ("--model", str(tiny), "--repeats", "1", "--kernels", "best,torch", "--json", str(out))
    threads = torch.get_num_threads()
    try:
        assert run(arguments("kernels", *flags)) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(out.read_text())
    parts = [(each["part"], each["kernels"]) for each in found["results"]]
    assert set(parts) == {
        (part, kernels)
        for part in ("decode", "forms", "prefill", "linear", "step")
        for kernels in (IN_GATE[0], "torch")
    }
    assert all(each["share"] > 0 and each["timed"]["median_s"] > 0 for each in found["results"])
    assert found["limits"][0]["read_bytes_per_s"] > 0
    printed = capsys.readouterr().out
    assert "512 tokens at the end of 2048" in printed
    assert "threads 1: reads" in printed


def test_a_model_with_experts_is_timed_beside_a_dense_one_of_equal_active_size(setting: Setting) -> None:
    assert QWEN3.experts is not None
    spec = replace(
        QWEN3, layers=2, vocab_size=64, hidden_size=32, intermediate_size=64, experts=replace(QWEN3.experts, width=8)
    )
    found = list(bench_experts(setting, spec))
    by_kind = {each.what: each.work for each in found}
    assert len(by_kind) == 6
    router = 2 * 64 * 32
    for what, work in by_kind.items():
        if what.startswith("experts"):
            dense = by_kind[what.replace("experts", "dense")]
            tokens = 512 if "prefill" in what else 16 if "16 x" in what else 1
            assert work.operations == pytest.approx(dense.operations + 2 * router * tokens)
            assert work.bytes >= dense.bytes + 2 * router
    one, many = (by_kind[f"experts, decode, {count} x 128 context"].bytes for count in (1, 16))
    assert many > 2 * one, "16 tokens have most of the experts between them"


def test_attention_over_latents_reads_each_latent_once_and_multiplies_it_for_every_head(setting: Setting) -> None:
    found = list(bench_latents(setting, [Span(2, 1, 20)], []))
    assert [each.what for each in found] == [f"{name}, decode, 2 x 20 context" for name in ("V2-Lite", "V3")]
    for each, heads in zip(found, (16, 128), strict=True):
        assert each.work == Work(bytes=4 * 2 * 20 * 576 * 2, operations=4 * 2 * 20 * heads * (576 + 512) * 2)
        assert each.timed.median_s > 0


def test_prompts_of_latents_are_timed_absorbed_and_expanded(setting: Setting) -> None:
    model = setting.model
    with setting_of(model, setting.model_dir, setting.spec, threads=1, kernels=IN_GATE[0], repeats=1) as native:
        absorbed, expanded = bench_latents(native, [], [Span(1, 40, 48)])
    assert (absorbed.what, expanded.what) == (
        "V2-Lite, absorbed, 40 at the end of 48",
        "V2-Lite, expanded, 40 at the end of 48",
    )
    assert expanded.work.operations < absorbed.work.operations + 2 * 8 * 16 * 512 * 256


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--threads", "0"], "threads"),
        (["--threads", "9999"], "threads"),
        (["--threads", "one"], "threads"),
        (["--threads", "1,,1"], "threads"),
        (["--only", "decode,sampling"], "only"),
        (["--only", ""], "only"),
        (["--repeats", "0"], "repeats"),
        (["--dtype", "int4"], "dtype"),
        (["--weights", "int2"], "weights"),
        (["--model", "paced:"], "model"),
        (["--json", "/no/such/directory/kernels.json"], "json"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(arguments: Any, flags: list[str], field: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field}") as caught:
        options_from(arguments("kernels", *flags))
    assert caught.value.field is not None
    assert caught.value.field.removeprefix("--") == field


def test_kernels_that_this_cpu_has_not_are_refused(arguments: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "BUFFER_BYTES", 1 << 20)
    with pytest.raises(ConfigError, match=r"neon is not what this CPU can run; it can run: .*torch"):
        run(arguments("kernels", "--model", str(tiny), "--repeats", "1", "--kernels", "neon"))


def test_a_model_that_is_not_here_is_named_with_what_fetches_it(
    arguments: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="twostroke model pull smollm2-135m"):
        run(arguments("kernels"))
