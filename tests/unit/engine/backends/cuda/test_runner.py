"""The device's step, on the CPU in a device's place: token by token what the CPU's own runner computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from tests.unit.engine.batches import Stream, step
from tests.unit.engine.reference_attention import reference_kernels
from tests.unit.kernels.pools.whole_pool import pool_over
from twostroke.base.errors import EngineLost
from twostroke.config import ModelConfig
from twostroke.engine.backends.cpu.runner import ModelRunner, RunnerResources
from twostroke.engine.backends.cuda.accelerator import CpuAccelerator
from twostroke.engine.backends.cuda.plan import DeviceKernels, DevicePlan, make_device_runner
from twostroke.engine.backends.cuda.runner import DeviceRunner
from twostroke.engine.backends.cuda.staging import HostArray, Staging
from twostroke.engine.cores.cores import Cores
from twostroke.kernels.page_forms.nibble_pool import NibblePool
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.pools.parted_pool import AnyPool, parts_of
from twostroke.kv_cache.form import FORMS, page_form
from twostroke.kv_cache.memory import PageMemory
from twostroke.models.registry import read_spec
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.files import TensorFiles
from twostroke.request import SampledToken, SamplingParams
from twostroke.scheduler.batch import Runner, ScoreRow
from twostroke.worker.steps.calibration import CalibrationLimits, sweep

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
}
PAGES = 60


@pytest.fixture(params=list(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[request.param])
    for name, tensor in model.state_dict().items():
        if "norm" in name or "bias" in name:
            tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(tmp_path)
    return tmp_path


def plan_for(spec: ModelSpec, *, with_head: bool = True, form: str = "float32") -> DevicePlan:
    return DevicePlan(
        spec=spec,
        device=torch.device("cpu"),
        dtype="float32",
        form=page_form(form),
        block_size=16,
        max_model_len=128,
        max_tokens=48,
        max_sequences=6,
        with_head=with_head,
    )


def on_device(directory: Path, plan: DevicePlan) -> DeviceRunner:
    pages = torch.zeros((PAGES + 1, plan.needs().page_bytes), dtype=torch.uint8)
    with TensorFiles(directory, torch.float32, plan.device) as files:
        return make_device_runner(plan, files, [pages], CpuAccelerator(), reference_kernels)


@pytest.fixture
def runners(directory: Path) -> Iterator[list[Runner]]:
    spec = read_spec(directory)
    memory = PageMemory(PAGES, spec.page_bytes(16, "float32"))
    usual = ModelRunner(
        directory,
        spec,
        memory,
        ModelConfig(dtype="float32"),
        pool=PagePool.over(torch.from_numpy(memory.data), FORMS["float32"], spec.page_shape(16)),
        resources=RunnerResources(Cores((0,))),
        with_head=True,
    )
    device = on_device(directory, plan_for(spec))
    yield [usual, device]
    for runner in (usual, device):
        runner.close()
    memory.close()


def streams() -> list[Stream]:
    draw = torch.Generator().manual_seed(3)
    drawn = SamplingParams(seed=11, max_tokens=99, temperature=0.9, top_p=0.9)
    watched = SamplingParams(seed=5, max_tokens=99, temperature=0, logprobs=2, repetition_penalty=1.3)
    prompts = [torch.randint(0, 160, (count,), generator=draw).tolist() for count in (45, 3, 17, 32, 20)]
    made = [Stream(prompt, list(range(8 * row, 8 * row + 8))) for row, prompt in enumerate(prompts)]
    made[1] = replace(made[1], params=drawn)
    made[3] = replace(made[3], params=watched)
    return made


def serve(runner: Runner) -> list[list[SampledToken]]:
    """Chunks beside decoding streams first, then decode steps of shrinking batches, through scattered pages.

    Each step says which blocks the one before it has finished, as a scheduler does.
    """
    known = streams()
    released: list[int] = []
    answers: list[list[SampledToken]] = [[] for _ in known]

    def advance(rows: list[int], counts: list[int]) -> None:
        parts = [(known[row], count) for row, count in zip(rows, counts, strict=True)]
        batch = replace(step(parts), released=tuple(released))
        sampled = runner.run(batch).tokens
        released.clear()
        for stream, count in parts:
            start, stream.computed = stream.computed, stream.computed + count
            released.extend(stream.pages[start // 16 : stream.computed // 16])
        for sample, token in zip(batch.samples, sampled, strict=True):
            row = rows[sample.row]
            answers[row].append(token)
            known[row].tokens.append(token.token)

    advance([0], [31])
    advance([0, 1, 2], [14, 3, 17])
    advance([0, 1, 2, 3], [1, 1, 1, 32])
    advance([4, 0, 1, 2, 3], [20, 1, 1, 1, 1])
    for rows in ([0, 1, 2, 3, 4], [4, 2, 0], [1, 3], [3], [0, 1, 2, 3, 4]):
        advance(rows, [1] * len(rows))
    return answers


def test_a_device_step_samples_what_the_cpu_runner_samples(runners: list[Runner]) -> None:
    usual, device = (serve(runner) for runner in runners)
    assert [[token.token for token in answer] for answer in device] == [
        [token.token for token in answer] for answer in usual
    ]
    assert sum(len(answer) for answer in device) == 28
    watched = zip(device[3], usual[3], strict=True)
    assert all(mine.logprob == pytest.approx(theirs.logprob, abs=1e-4) for mine, theirs in watched)
    assert [len(token.top) for token in device[3]] == [2] * len(device[3])


@pytest.mark.parametrize("form", ["int4", "int4+1xfloat32"])
def test_a_device_step_over_int4_pages_samples_and_stores_what_the_cpu_runner_does(directory: Path, form: str) -> None:
    spec = read_spec(directory)
    plan = plan_for(spec, form=form)
    shape, memory = spec.page_shape(16), PageMemory(PAGES, plan.needs().page_bytes)
    usual = ModelRunner(
        directory,
        spec,
        memory,
        ModelConfig(dtype="float32"),
        pool=pool_over(torch.from_numpy(memory.data), plan.form, shape, torch.float32),
        resources=RunnerResources(Cores((0,))),
        with_head=True,
    )
    pages = torch.zeros((PAGES + 1, plan.needs().page_bytes), dtype=torch.uint8)
    pool: list[AnyPool] = []

    def kernels(over: AnyPool, spec: ModelSpec, dtype: torch.dtype) -> DeviceKernels:
        pool.append(over)
        return reference_kernels(over, spec, dtype)

    with TensorFiles(directory, torch.float32, plan.device) as files:
        device = make_device_runner(plan, files, [pages], CpuAccelerator(), kernels)
    mine, theirs = ([[token.token for token in answer] for answer in serve(runner)] for runner in (device, usual))
    assert mine == theirs
    over = nibbles_of(pool[0])
    assert len(over.exact.slots) <= 5 + 1, "one of each sequence, and what the last step has finished"
    right = nibbles_of(pool_over(torch.from_numpy(memory.data)[:PAGES], plan.form, shape, torch.float32))
    assert over.layers == right.layers == over.exact.pool.layers
    stored = torch.tensor([page for stream in streams() for page in stream.pages[: len(stream.tokens) // 16]])
    for layer in range(over.layers):
        close = torch.isclose(over.read(stored, layer), right.read(stored, layer), atol=1e-3)
        assert close.float().mean() > 0.99, "numbers at the edge between two may differ"
    for runner in (usual, device):
        runner.close()
    memory.close()


def nibbles_of(pool: AnyPool) -> NibblePool:
    """Returns the pool's part of 4-bit numbers."""
    [found] = [part for part in parts_of(pool) if isinstance(part, NibblePool)]
    return found


def test_a_sequence_whose_numbers_overflow_ends_alone_and_changes_no_bit_of_its_neighbours(
    directory: Path, runners: list[Runner]
) -> None:
    """Token 7 of the second model is infinite; so are the logits of whoever reads it."""
    spec = read_spec(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.inf
    if spec.tie_word_embeddings:
        pytest.skip("its head would overflow for everybody")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    memory = PageMemory(PAGES, spec.page_bytes(16, "float32"))
    corrupt: list[Runner] = [
        ModelRunner(
            directory,
            spec,
            memory,
            ModelConfig(dtype="float32"),
            pool=PagePool.over(torch.from_numpy(memory.data), FORMS["float32"], spec.page_shape(16)),
            resources=RunnerResources(Cores((0,))),
            with_head=True,
        ),
        on_device(directory, plan_for(spec)),
    ]
    for healthy, runner in zip(runners, corrupt, strict=True):
        results = []
        for each, token in ((healthy, 8), (runner, 7)):
            known = [streams()[row] for row in (2, 1, 4)]
            for stream in known:
                stream.tokens[:] = [8 if token == 7 else token for token in stream.tokens]
            known[1].tokens[1] = token
            parts = [(stream, len(stream.tokens)) for stream in known]
            first = each.run(step(parts)).tokens
            for stream, sampled in zip(known, first, strict=True):
                stream.computed, stream.tokens = len(stream.tokens), [*stream.tokens, sampled.token % 7]
            second = each.run(step([(known[row], 1) for row in range(3)])).tokens
            results.append([*first, *second])
        assert [token.is_sound for token in results[0]] == [True] * 6
        assert [token.is_sound for token in results[1]] == [True, False, True] * 2
        assert [results[1][row] for row in (0, 2, 3, 5)] == [results[0][row] for row in (0, 2, 3, 5)]
    for runner in corrupt:
        runner.close()
    memory.close()


def test_a_device_that_fails_is_lost_and_one_without_memory_is_not(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error: Exception = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    runner = on_device(directory, plan_for(read_spec(directory)))

    def fail() -> None:
        raise error

    monkeypatch.setattr(runner._accelerator, "synchronize", fail)
    [stream, *_] = streams()
    with pytest.raises(EngineLost, match="illegal memory access"):
        runner.run(step([(stream, 3)]))
    error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        runner.run(step([(stream, 3)]))
    runner.close()


def test_a_recorded_step_equals_the_same_step_launch_by_launch(runners: list[Runner]) -> None:
    device = runners[1]
    assert isinstance(device, DeviceRunner)
    known = streams()[:3]
    for stream in known:
        device.run(step([(stream, len(stream.tokens) - 1)]))
        stream.computed = len(stream.tokens) - 1
    batch = step([(stream, 1) for stream in known])
    eager = device.logits(batch)
    assert eager is not None
    recorded = device.run(batch)
    assert recorded.tokens[0].token == int(eager[0].argmax())
    assert recorded.tokens[2].token == int(eager[2].argmax())


def test_a_prefill_worker_has_no_head_and_fills_the_same_pages(directory: Path) -> None:
    spec = read_spec(directory)
    decode, prefill = plan_for(spec), plan_for(spec, with_head=False)
    assert prefill.needs().weight_bytes == decode.needs().weight_bytes - (
        0 if spec.tie_word_embeddings else 160 * 64 * 4
    )
    chunk = step([(Stream(list(range(40)), [3, 1, 2]), 32)])
    pools = []
    for plan in (decode, prefill):
        pages = torch.zeros((PAGES + 1, plan.needs().page_bytes), dtype=torch.uint8)
        pool = pages.view(torch.float32).view(-1, *spec.page_shape(16).dims)
        with TensorFiles(directory, torch.float32, plan.device) as files:
            runner = make_device_runner(plan, files, [pages], CpuAccelerator(), reference_kernels)
        assert runner.run(chunk).tokens == ()
        pools.append(pool[:PAGES])
    assert torch.equal(*pools)
    assert pools[0][[3, 1]].count_nonzero() > 0
    assert pools[0][[0, 2, 4]].count_nonzero() == 0, "warming up and padding touch the scratch page alone"


def test_warming_up_packs_no_step_before_the_last_one_is_done(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    upload = Staging.upload

    class Watched(CpuAccelerator):
        def synchronize(self) -> None:
            said.append("wait")

    def watched_upload(staging: Staging, arrays: Sequence[HostArray]) -> list[torch.Tensor]:
        said.append("upload")
        return upload(staging, arrays)

    monkeypatch.setattr(Staging, "upload", watched_upload)
    plan = plan_for(read_spec(directory), with_head=False)
    pages = torch.zeros((PAGES + 1, plan.needs().page_bytes), dtype=torch.uint8)
    with TensorFiles(directory, torch.float32, plan.device) as files:
        make_device_runner(plan, files, [pages], Watched(), reference_kernels)
    assert said == ["upload", "wait"] * (len(said) // 2)
    assert len(said) > 2


@pytest.mark.parametrize("form", ["float32", "int4"])
@pytest.mark.parametrize("samples", [True, False])
def test_a_worker_on_a_device_can_be_calibrated_and_its_pages_stay_as_they_were(
    directory: Path, samples: bool, form: str
) -> None:
    plan = plan_for(read_spec(directory), with_head=samples, form=form)
    pages = torch.zeros((PAGES + 1, plan.needs().page_bytes), dtype=torch.uint8)
    with TensorFiles(directory, torch.float32, plan.device) as files:
        runner = make_device_runner(plan, files, [pages], CpuAccelerator(), reference_kernels)
    reach = CalibrationLimits(
        step_tokens=plan.max_tokens,
        max_model_len=plan.max_model_len,
        max_sequences=plan.max_sequences,
        pages=PAGES,
        block_size=plan.block_size,
        runs_decode=samples,
    )
    for batch in sweep(reach):
        assert len(runner.run(batch).tokens) == len(batch.samples)
    assert not pages[:PAGES].any()
    assert pages[PAGES].any()
    runner.close()


def test_logprobs_of_prompts_are_those_of_the_cpu_beside_streams_too(runners: list[Runner]) -> None:
    found = []
    for runner in runners:
        known = streams()
        runner.run(step([(known[1], 3)]))
        known[1].computed = 3
        known[1].tokens.append(7)
        batch = step([(known[0], 40), (known[1], 1), (known[2], 1)])
        scores = ScoreRow(0, tuple(known[0].tokens[1:41]), 3), ScoreRow(2, (known[2].tokens[1],), 3)
        result = runner.run(replace(batch, scores=scores))
        known[2].computed = 1
        single = runner.run(replace(step([(known[2], 1)]), scores=(ScoreRow(0, (known[2].tokens[2],), 3),)))
        assert len(result.tokens) == 1
        found.append([*result.scores, *single.scores])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=1e-4, atol=1e-4)
        assert (ours.ordinals, ours.top_ids) == (theirs.ordinals, theirs.top_ids)
