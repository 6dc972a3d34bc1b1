"""A worker's engine as it is built for a device; the CPU and the reference take the device's and the kernels' place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.unit.engine.batches import Stream, generate
from tests.unit.engine.reference_attention import reference_attention
from tests.unit.engine.tiny import PAGE_BYTES, TINY, save_tiny
from tests.unit.models.family_configs import CONFIGS, WINDOW
from tests.unit.models.test_registry import saved
from tests.unit.models.weights.stored.coded_models import FORMATS, quantised
from tests.unit.models.weights.stored.gguf_models import SIZES
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, ModelConfig, Role, ScheduleConfig, WorkerConfig
from twostroke.device.memory import DeviceMemory
from twostroke.engine import build
from twostroke.engine.backends.cuda import plan as device_build
from twostroke.engine.backends.cuda.fit import MemoryReading
from twostroke.engine.backends.cuda.runner import DeviceRunner
from twostroke.engine.branches import cuda_backend
from twostroke.engine.build import build_runner
from twostroke.kernels.attention.rules import AnyRules
from twostroke.kernels.cpu.variants import OVERRIDE, TORCH
from twostroke.kernels.pools.parted_pool import AnyPool, RecordedAttention
from twostroke.models.registry import read_spec
from twostroke.models.weights.files import TensorFiles


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny(tmp_path)


def config(directory: Path, role: Role = Role.DECODE, **model: str | int) -> WorkerConfig:
    return WorkerConfig(
        role=role,
        worker_id="worker",
        model=ModelConfig(model=str(directory), **{"dtype": "float32", "device": "cuda", **model}),  # type: ignore[arg-type]
        cache=CacheConfig(kv_cache_memory_bytes=20 * PAGE_BYTES),
        schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=32),
    )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU answers to the name of a CUDA device."""

    def attention(
        pool: AnyPool, *, heads: int, rules: AnyRules, dtype: torch.dtype, has_sinks: bool
    ) -> RecordedAttention:
        assert dtype == torch.float32
        return reference_attention(pool, heads, rules)

    monkeypatch.setattr("twostroke.engine.backends.cuda.fit.resolve_device", lambda _name: torch.device("cpu"))
    monkeypatch.setattr(build, "cpu_backend", cuda_backend)
    monkeypatch.setattr(
        "twostroke.engine.backends.cuda.fit.read_memory", lambda _device: MemoryReading("cuda:0", 8 << 30, 8 << 30)
    )
    monkeypatch.setattr(device_build, "device_attention", attention)


@pytest.mark.usefixtures("device")
def test_a_worker_on_a_device_answers_as_one_on_the_cpu(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]
    built = build_runner(config(tiny), tiny)
    assert isinstance(built.memory, DeviceMemory)
    assert isinstance(built.runner, DeviceRunner)
    assert (built.model.pages, built.memory.regions[0].shape) == (20, (21, PAGE_BYTES))
    answer = generate(built.runner, Stream(prompt.copy(), [7, 2, 9]), 10, chunk=7)
    built.close()
    monkeypatch.undo()
    monkeypatch.setenv(OVERRIDE, TORCH)  # the native kernel keeps pages in another order
    usual = build_runner(config(tiny, device="cpu"), tiny)
    assert generate(usual.runner, Stream(prompt.copy(), [1, 2, 3]), 10, chunk=7) == answer
    assert usual.model.fingerprint == built.model.fingerprint, "they hold the same KV and may exchange pages"
    usual.close()


@pytest.mark.usefixtures("device")
def test_a_device_that_is_too_small_is_refused_before_a_weight_is_read(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_args: object) -> None:
        raise AssertionError("the weights were opened")

    monkeypatch.setattr(TensorFiles, "__init__", never)
    monkeypatch.setattr(
        "twostroke.engine.backends.cuda.fit.read_memory", lambda _device: MemoryReading("cuda:0", 1 << 20, 1 << 30)
    )
    weights = 4 * sum(weight.numel() for weight in AutoModelForCausalLM.from_config(TINY).parameters())
    with pytest.raises(ConfigError, match=rf"--device cuda:0 is \d+ bytes too small: weights take {weights}, working"):
        build_runner(config(tiny), tiny)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("deepseek_v2, lite", "DeepseekV2ForCausalLM (latents); use --device cpu"),
        ("deepseek_v3", "DeepseekV3ForCausalLM (latents); use --device cpu"),
    ],
)
def test_families_that_only_cpus_compute_are_refused_by_name(tmp_path: Path, name: str, named: str) -> None:
    saved(CONFIGS[name], tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError) as refusal:
        build_runner(config(tmp_path), tmp_path)
    assert named in refusal.value.message


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "name",
    [
        "mistral, window",
        "qwen2, windows above",
        "gemma2",
        "gemma2, tight caps",
        "gemma3",
        "phi3, long and partly rotated",
        "phi3, window",
        "gpt_neox",
        "gpt_neox, one after the other",
        "gpt2",
        "gpt2, scores by layer",
        "mixtral, window",
        "qwen2_moe",
        "qwen2_moe, some layers dense",
        "qwen3_moe, some layers dense",
        "gpt_oss",
        "gpt_oss, tight limit, no biases of attention",
    ],
)
def test_families_answer_as_on_the_cpu_and_their_experts_are_counted_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Prompts are longer than windows; decode steps are recorded."""
    saved(CONFIGS[name], tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    vocab = read_spec(tmp_path).vocab_size
    prompt = [7919 * index % vocab for index in range(1, 2 * WINDOW)]
    room = CacheConfig(kv_cache_memory_bytes=8 << 20)
    on_device = config(tmp_path, max_model_len=96).model_copy(update={"cache": room})
    built = build_runner(on_device, tmp_path)
    assert isinstance(built.runner, DeviceRunner)
    rows = [6, 1, 3, 0] if len(built.model.page_groups) > 1 else None
    answer = generate(built.runner, Stream(prompt.copy(), [7, 2, 9, 4], window_rows=rows), 8, chunk=9)
    built.close()
    monkeypatch.undo()
    monkeypatch.setenv(OVERRIDE, TORCH)
    on_cpu = config(tmp_path, max_model_len=96, device="cpu").model_copy(update={"cache": room})
    usual = build_runner(on_cpu, tmp_path)
    assert generate(usual.runner, Stream(prompt.copy(), [1, 2, 3, 5], window_rows=rows), 8, chunk=9) == answer
    assert usual.model.fingerprint == built.model.fingerprint
    loads = [None if engine.expert_load is None else engine.expert_load.tokens.tolist() for engine in (built, usual)]
    assert loads[0] == loads[1]
    usual.close()


@pytest.mark.usefixtures("device")
def test_int8_weights_are_for_cpus(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="--weights int8 is for CPUs: use --device cpu"):
        build_runner(config(tiny, dtype="bfloat16", weights="int8"), tiny)


@pytest.mark.usefixtures("device")
def test_a_prefill_worker_loads_no_head(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    take = TensorFiles.take

    def note(files: TensorFiles, name: str, *shape: int) -> torch.Tensor:
        taken.append(name)
        return take(files, name, *shape)

    monkeypatch.setattr(TensorFiles, "take", note)
    build_runner(config(tiny, Role.PREFILL), tiny).close()
    assert "lm_head.weight" not in taken
    build_runner(config(tiny), tiny).close()
    assert "lm_head.weight" in taken


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_machine_without_the_device_refuses_to_start(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="--device cuda") as error:
        build_runner(config(tiny), tiny)
    assert error.value.field == "device"


@pytest.mark.usefixtures("device")
def test_a_worker_on_a_device_keeps_the_codes_of_a_quantised_model(tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    plain = build_runner(config(tmp_path), tmp_path)
    quantised(tmp_path, FORMATS["compressed int4"])
    built = build_runner(config(tmp_path), tmp_path)
    assert plain.weights is not None
    assert built.weights is not None
    # not a quarter: tables stay as they are, and inputs of 64 and 96 fill no tile of 128 codes
    assert built.weights.billed_bytes < plain.weights.billed_bytes / 2
    answer = generate(built.runner, Stream([3, 1, 4, 1, 5, 9, 2, 6], [7]), 6, chunk=7)
    assert len(answer) == 6
    built.close()
    plain.close()
