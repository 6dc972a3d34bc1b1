"""What a worker learns of its engine, and what it is refused for."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.unit.engine.batches import Stream, step
from tests.unit.engine.tiny import PAGE_BYTES, TINY, save_tiny
from tests.unit.kernels.variants import IN_GATE, VARIANTS
from tests.unit.models.family_configs import CONFIGS
from tests.unit.models.test_registry import saved
from twostroke.base import cache_key as keys
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, ModelConfig, Role, RuntimeConfig, WorkerConfig
from twostroke.engine.backends.built import KernelsInUse
from twostroke.engine.backends.cpu.runner import ModelRunner
from twostroke.engine.backends.facts import NATIVE_ORDER
from twostroke.engine.backends.paced.runner import PacedRunner
from twostroke.engine.build import build_runner
from twostroke.kernels.cpu.attention import FORMS
from twostroke.kernels.cpu.choice import BY_FLAG, MEASURED, ONLY_ONE
from twostroke.kernels.cpu.variants import OVERRIDE, TORCH, chosen_variants
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kv_cache.form import Conversion, KvForm
from twostroke.kv_cache.memory import PageMemory
from twostroke.kv_cache.parts import GroupKind
from twostroke.worker.tiers.opening import record_format


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


def config(model: str, memory_bytes: int = 10 * PAGE_BYTES, **model_config: Any) -> WorkerConfig:
    settings = ModelConfig(model=model, **{"dtype": "float32", **model_config})
    return WorkerConfig(
        role=Role.DECODE,
        worker_id="decode-0",
        model=settings,
        cache=CacheConfig(kv_cache_memory_bytes=memory_bytes),
    )


def test_workers_whose_pages_have_another_order_do_not_exchange_them(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprints = []
    for variant in (IN_GATE[0], TORCH):
        monkeypatch.setenv(OVERRIDE, variant)
        built = build_runner(config(str(tiny)), tiny)
        fingerprints.append(built.model.fingerprint)
        built.close()
    native, plain = fingerprints
    assert NATIVE_ORDER in native
    assert plain == native.replace(NATIVE_ORDER, "")


@pytest.mark.parametrize("cause", ["a kernel", "torch"])
def test_a_worker_of_a_repaired_program_does_not_take_pages_of_the_broken_one(
    cause: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OVERRIDE, TORCH)  # no kernels are compiled for this
    models = []
    for model in (str(tiny), "paced:"):
        for is_repaired in (False, True):
            with monkeypatch.context() as patch:
                if is_repaired and cause == "torch":
                    patch.setattr(keys, "version", lambda library: "99.0")
                elif is_repaired:
                    patch.setattr(keys, "_source_digest", lambda program, code: b"repaired")
                built = build_runner(config(model), None if model == "paced:" else tiny)
            models.append(built.model)
            built.close()
    before, after, paced_before, paced_after = models
    for old, new in ((before, after), (paced_before, paced_after)):
        assert old.fingerprint != new.fingerprint
        assert record_format(old, GroupKind.FULL).identity != record_format(new, GroupKind.FULL).identity, (
            "on disk, too"
        )


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"])
@pytest.mark.parametrize("is_renamed", [False, True])
def test_files_copied_over_while_a_worker_loads_them_give_no_old_fingerprint_to_new_weights(
    name: str, is_renamed: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OVERRIDE, TORCH)
    load, closed, close = ModelRunner._loaded, [], ModelRunner.close
    content = (tiny / name).read_bytes()

    def replaced_first(runner: ModelRunner, *arguments: Any, **options: Any) -> Any:
        where = tiny / "copy" if is_renamed else tiny / name
        where.write_bytes(content)
        where.rename(tiny / name)
        return load(runner, *arguments, **options)

    monkeypatch.setattr(ModelRunner, "_loaded", replaced_first)
    monkeypatch.setattr(ModelRunner, "close", lambda runner: (closed.append(runner), close(runner)))
    with pytest.raises(ConfigError, match=rf"{name} changed while it was read"):
        build_runner(config(str(tiny)), tiny)
    assert closed


def test_workers_whose_pages_have_another_form_have_another_page_identity(tiny: Path) -> None:
    found = {}
    for form in (None, *FORMS):
        asked = config(str(tiny))
        built = build_runner(asked.model_copy(update={"cache": CacheConfig(kv_format=form)}), tiny)
        found[form] = built.model
        built.close()
    assert found[None] == found["float32"], "the form is the model's dtype unless another is asked for"
    assert len({model.fingerprint for model in found.values()}) == 1, "the form lies beside it"
    assert len({model.page_identity for model in found.values()}) == len(FORMS)
    assert {form: found[form].kv_form.format for form in FORMS} == {form: form for form in FORMS}
    elements = PAGE_BYTES // 4
    scales = elements // (TINY.hidden_size // TINY.num_attention_heads)
    assert found["bfloat16"].page_bytes == 2 * elements
    assert found["int8"].page_bytes == found["fp8_e4m3"].page_bytes == elements + 4 * scales


def test_pages_with_other_exact_layers_have_another_page_identity(tmp_path: Path) -> None:
    """A form is a part of identity everywhere: in pulls, page connections, events, and records on disk."""
    deep = save_tiny(tmp_path / "deep", LlamaConfig(**TINY.to_diff_dict() | {"num_hidden_layers": 5}))
    found = []
    for exact_layers, dtype in ((0, "bfloat16"), (1, "bfloat16"), (2, "bfloat16"), (1, "float32")):
        cache = CacheConfig(kv_format="int4", kv_exact_layers=exact_layers)
        built = build_runner(config(str(deep), dtype=dtype).replace(cache=cache), deep)
        found.append(built.model)
        built.close()
    assert len({model.fingerprint for model in found[:3]}) == 1, "the form lies beside it"
    assert len({model.page_identity for model in found}) == len(found)
    assert [model.kv_form.format for model in found] == ["int4", "int4+1xbfloat16", "int4+2xbfloat16", "int4+1xfloat32"]
    assert not any(one.kv_form.takes(other.kv_form) for one, other in itertools.permutations(found, 2))
    layer = found[0].page_bytes // 5
    assert [model.page_bytes - (5 - 2 * n) * layer for n, model in enumerate(found[:3])] == [0, 2048, 4096]


def test_more_exact_layers_than_leave_one_are_refused(tiny: Path) -> None:
    cache = CacheConfig(kv_format="int4", kv_exact_layers=1)
    with pytest.raises(ConfigError, match=r"--kv-exact-layers 1 leaves none of this model's 2 layers to int4"):
        build_runner(config(str(tiny)).replace(cache=cache), tiny)


def test_prefill_workers_convert_their_pages_into_those_with_exact_layers(tmp_path: Path) -> None:
    deep = save_tiny(tmp_path / "deep", LlamaConfig(**TINY.to_diff_dict() | {"num_hidden_layers": 5}))
    cache = CacheConfig(decode_kv_format="int4", kv_exact_layers=1)
    models = []
    for role in (Role.PREFILL, Role.DECODE):
        built = build_runner(config(str(deep)).replace(role=role, cache=cache), deep)
        models.append(built.model)
        built.close()
    prefill, decode = models
    assert (str(prefill.kv_form), str(decode.kv_form)) == ("float32", "int4+1xfloat32 from float32")
    assert prefill.conversion is not None
    assert prefill.identity_in(prefill.conversion.target) == decode.page_identity
    assert prefill.conversion.page_bytes == decode.page_bytes


def test_where_the_roles_have_other_formats_both_know_how_to_convert(tiny: Path) -> None:
    cache = CacheConfig(kv_cache_memory_bytes=10 * PAGE_BYTES, decode_kv_format="int8")
    found = {}
    for role in (Role.PREFILL, Role.DECODE):
        built = build_runner(config(str(tiny)).replace(role=role, cache=cache), tiny)
        found[role] = built.model
        built.close()
    prefill, decode = found[Role.PREFILL], found[Role.DECODE]
    assert (str(prefill.kv_form), str(decode.kv_form)) == ("float32", "int8 from float32")
    assert prefill.fingerprint == decode.fingerprint
    assert prefill.conversion == decode.conversion is not None
    assert (prefill.conversion.source, prefill.conversion.target) == (prefill.kv_form, decode.kv_form)
    assert prefill.identity_in(decode.kv_form) == decode.page_identity != prefill.page_identity
    assert decode.identity_in(prefill.kv_form) == prefill.page_identity
    assert prefill.conversion.page_bytes == decode.page_bytes
    assert decode.pages == 10 * PAGE_BYTES // decode.page_bytes
    paid_bytes = prefill.pages * (prefill.page_bytes + decode.page_bytes)
    assert 9 * PAGE_BYTES < paid_bytes <= 10 * PAGE_BYTES, "converted pages are paid for out of the same memory"
    assert not decode.kv_form.takes(KvForm("int8")), "an int8 page was computed from int8 pages alone"
    assert not KvForm("int8").takes(decode.kv_form)
    assert decode.kv_form.takes(prefill.kv_form)


def test_pages_and_window_parts_are_converted_each_in_their_group(tmp_path: Path) -> None:
    windowed, memory = save_tiny(tmp_path / "windowed", CONFIGS["gemma3"]), 4 << 20
    cache, found = CacheConfig(kv_cache_memory_bytes=memory, decode_kv_format="int8"), []
    for role in (Role.PREFILL, Role.DECODE):
        built = build_runner(config(str(windowed)).replace(role=role, cache=cache), windowed)
        found.append(built.model)
        built.close()
    prefill, decode = found
    assert prefill.conversion == decode.conversion is not None
    assert prefill.fingerprint == decode.fingerprint
    assert tuple(each.page_bytes for each in prefill.conversion.groups) == decode.layout.page_sizes
    assert [each.shape.layers for each in prefill.conversion.groups] == [len(g.layers) for g in prefill.page_groups]
    paid_bytes = sum(
        region.pages * (region.page_bytes + each.page_bytes)
        for region, each in zip(prefill.layout.regions, prefill.conversion.groups, strict=True)
    )
    assert 0.95 * memory < paid_bytes <= memory
    cache, shapes = CacheConfig(kv_cache_memory_bytes=memory, decode_kv_format="int4"), []
    for role in (Role.PREFILL, Role.DECODE):
        built = build_runner(config(str(windowed)).replace(role=role, cache=cache), windowed)
        shapes.append(built.model.window_shape)
        built.close()
    assert [shape.tail_blocks for shape in shapes if shape is not None] == [3, 3], "a whole block may run again"
    assert prefill.window_shape is not None
    assert prefill.window_shape.tail_blocks == 2


@pytest.mark.parametrize("variant", [IN_GATE[0], TORCH])
def test_a_converted_page_and_a_computed_one_both_lack_the_centers_that_a_bias_gives_keys(
    tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of the first layer depend on no page, so that a page of int8 and a converted one hold the same there."""
    monkeypatch.setenv(OVERRIDE, variant)
    biased = save_tiny(tmp_path / "biased", LlamaConfig(**TINY.to_diff_dict() | {"attention_bias": True}))
    tensors = load_file(biased / "model.safetensors")
    for name in tensors:
        if name.endswith("k_proj.bias"):
            tensors[name][:] = torch.arange(16.0)
    save_file(tensors, biased / "model.safetensors", {"format": "pt"})
    cache, pages = CacheConfig(kv_cache_memory_bytes=10 * PAGE_BYTES, decode_kv_format="int8"), {}
    conversions: list[Conversion] = []
    for role in (Role.PREFILL, Role.DECODE):
        built = build_runner(config(str(biased)).replace(role=role, cache=cache), biased)
        built.runner.run(step([(Stream(list(range(3, 23)), [0, 1]), 16)]))
        assert isinstance(built.memory, PageMemory)
        pages[role] = torch.from_numpy(built.memory.data[0].copy())
        assert built.model.conversion is not None
        conversions.append(built.model.conversion)
        built.close()
    found = []
    conversion, same = conversions
    assert (conversion.has_pieces, conversion.key_centers is None) == (same.has_pieces, same.key_centers is None)
    assert conversion.key_centers is not None
    assert same.key_centers is not None
    assert np.array_equal(conversion.key_centers, same.key_centers)
    for each in (conversion, replace(conversion, key_centers=None)):
        found.append(torch.empty_like(pages[Role.DECODE]))
        convert_page(each, pages[Role.PREFILL], found[-1])
    computed, less, whole = (page.chunk(2)[0] for page in (pages[Role.DECODE], *found))
    assert torch.equal(less, computed)
    assert not torch.equal(whole, computed)


@pytest.mark.parametrize("variants", [pytest.param(VARIANTS[:2], marks=() if len(IN_GATE) > 1 else pytest.mark.slow)])
def test_pages_of_another_variant_are_the_same_within_rounding_and_refused_where_bits_count(
    tiny: Path, variants: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprints: dict[bool, set[str]] = {False: set(), True: set()}
    for variant in variants:
        monkeypatch.setenv(OVERRIDE, variant)
        for deterministic, found in fingerprints.items():
            built = build_runner(config(str(tiny), dtype="bfloat16", deterministic=deterministic), tiny)
            found.add(built.model.fingerprint)
            built.close()
    assert len(fingerprints[False]) == 1
    assert len(fingerprints[True]) == len(variants)


def test_a_worker_says_what_computes_its_steps_and_why(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variant in (IN_GATE[0], TORCH):
        monkeypatch.setenv(OVERRIDE, variant)
        built = build_runner(config(str(tiny)), tiny)
        assert built.kernels == KernelsInUse(variant, BY_FLAG, threads=1)
        built.close()
    monkeypatch.delenv(OVERRIDE)
    built = build_runner(config(str(tiny)), tiny)
    assert built.kernels is not None
    assert built.kernels.variant in {variant.name for variant in chosen_variants()}
    assert built.kernels.reason in {MEASURED, ONLY_ONE}
    built.close()


def test_a_real_model_is_built_with_as_many_pages_as_fit(tiny: Path) -> None:
    built = build_runner(config(str(tiny), 10 * PAGE_BYTES + 5, served_model_name="small"), tiny)
    facts = built.model
    assert isinstance(built.runner, ModelRunner)
    assert (facts.name, facts.max_model_len, facts.vocab_size, facts.eos_token_ids) == ("small", 128, 64, (2,))
    assert (facts.pages, facts.page_bytes, facts.block_size, facts.dtype) == (10, PAGE_BYTES, 16, "float32")
    assert built.memory.pages == 10
    assert len(built.runner.run(step([(Stream([1, 2, 3], [4]), 3)])).tokens) == 1
    built.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_run(tiny: Path, dtype: str) -> None:
    built = build_runner(config(str(tiny), dtype=dtype), tiny)
    assert built.model.pages == 20
    assert 0 <= built.runner.run(step([(Stream(list(range(40)), [4, 5, 6]), 40)])).tokens[0].token < 64
    built.close()


def test_a_paced_model_is_built_without_a_directory() -> None:
    built = build_runner(config("paced:vocab=300,page_bytes=1024,eos=3,max_model_len=500", 5000), None)
    facts = built.model
    assert isinstance(built.runner, PacedRunner)
    assert (facts.pages, facts.page_bytes, facts.vocab_size, facts.max_model_len) == (4, 1024, 300, 500)
    assert facts.eos_token_ids == (3,)
    assert built.kernels is None
    built.close()


def test_a_pool_of_less_than_two_pages_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="holds 1 pages of 4096 bytes") as error:
        build_runner(config(str(tiny), 2 * PAGE_BYTES - 1), tiny)
    assert error.value.field == "kv_cache_memory"


def test_more_length_than_the_model_has_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="max-model-len 129 is more than the 128 tokens"):
        build_runner(config(str(tiny), max_model_len=129), tiny)


@pytest.mark.parametrize("max_model_len", [128, 81])
def test_a_length_that_was_asked_for_and_does_not_fit_the_pool_is_refused_with_what_would_help(
    tiny: Path, max_model_len: int
) -> None:
    with pytest.raises(ConfigError) as error:
        build_runner(config(str(tiny), 5 * PAGE_BYTES, max_model_len=max_model_len), tiny)
    assert error.value.field == "max_model_len"
    wanted = {128: 8, 81: 6}[max_model_len] * PAGE_BYTES
    assert error.value.message == (
        f"--max-model-len {max_model_len} does not fit: the page pool of {5 * PAGE_BYTES} bytes holds 80 tokens "
        f"(5 pages of 16); use --kv-cache-memory {wanted} (0 MiB), or --max-model-len 80 or less"
    )
    build_runner(config(str(tiny), wanted, max_model_len=max_model_len), tiny).close()
    build_runner(config(str(tiny), 5 * PAGE_BYTES, max_model_len=80), tiny).close()


@pytest.mark.parametrize("kind", ["real", "paced"])
def test_a_pool_that_is_smaller_than_the_models_length_is_told_with_what_fits_and_what_would(
    tiny: Path, kind: str
) -> None:
    paced = f"paced:page_bytes={PAGE_BYTES},max_model_len=128"
    chosen, directory = (str(tiny), tiny) if kind == "real" else (paced, None)
    roomy = build_runner(config(chosen, 8 * PAGE_BYTES), directory)
    assert roomy.model.advice == ""
    roomy.close()
    small = build_runner(config(chosen, 5 * PAGE_BYTES), directory)
    small.close()
    assert "requests of 128 tokens" in small.model.advice
    assert "holds 80 tokens" in small.model.advice
    assert f"--kv-cache-memory {8 * PAGE_BYTES} " in small.model.advice


PATIENCE_S = 60.0


def test_a_model_that_cannot_be_loaded_leaves_no_threads(tiny: Path) -> None:
    def fail() -> None:
        with pytest.raises(ConfigError, match="no tensor"):
            build_runner(config(str(tiny)).replace(runtime=RuntimeConfig(threads=2)), without_a_tensor(tiny))

    fail()
    after_one = len(os.listdir("/proc/self/task"))
    fail()
    fail()
    give_up_s = time.monotonic() + PATIENCE_S  # the kernel lists a thread for a moment after it was joined
    while len(threads := os.listdir("/proc/self/task")) > after_one:
        assert time.monotonic() < give_up_s, f"{len(threads)} threads, {after_one} after the first failure"
        time.sleep(0.01)


def without_a_tensor(directory: Path) -> Path:
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.norm.weight", None)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_rounded_weights_have_a_fingerprint_of_their_own() -> None:
    prints = set()
    for weights in ("model", "int8"):
        built = build_runner(config("paced:", 1 << 20, dtype="bfloat16", weights=weights), None)
        prints.add(built.model.fingerprint)
        built.close()
    assert len(prints) == 2


def test_fingerprints_agree_on_copies_and_differ_where_pages_would(tiny: Path, tmp_path: Path) -> None:
    def fingerprint(directory: Path, **model_config: Any) -> str:
        built = build_runner(config(str(directory), **model_config), directory)
        built.close()
        return built.model.fingerprint

    copy = tmp_path / "elsewhere" / "tiny"
    shutil.copytree(tiny, copy)
    assert fingerprint(copy) == fingerprint(tiny)
    assert fingerprint(tiny, dtype="bfloat16") != fingerprint(tiny)
    (copy / "tokenizer.json").write_text('{"other": 1}')
    assert fingerprint(copy) != fingerprint(tiny)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(TINY).save_pretrained(copy)
    (copy / "tokenizer.json").write_text("{}")
    assert fingerprint(copy) != fingerprint(tiny)


def test_the_served_length_makes_another_fingerprint_where_it_makes_another_rope(tiny: Path, tmp_path: Path) -> None:
    long = tmp_path / "long"
    saved(CONFIGS["phi3, long and partly rotated"], long)
    (long / "tokenizer.json").write_text("{}")
    counts = {}
    for directory in (tiny, long):
        prints = set()
        for max_model_len in (48, 64, 100):
            built = build_runner(config(str(directory), 1 << 20, max_model_len=max_model_len), directory)
            built.close()
            prints.add(built.model.fingerprint)
        counts[directory] = len(prints)
    assert counts == {tiny: 1, long: 2}


def test_a_single_bit_in_the_middle_of_a_tensor_makes_another_fingerprint(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    weights.write_bytes(content)
    prints = []
    for directory in (tiny, copy):
        built = build_runner(config(str(directory)), directory)
        built.close()
        prints.append(built.model.fingerprint.replace(directory.name, "tiny"))
    assert prints[0] != prints[1]


def test_paced_fingerprints_differ_with_the_page() -> None:
    built = [build_runner(config(f"paced:page_bytes={size}", 5000), None) for size in (1024, 2048)]
    assert built[0].model.fingerprint != built[1].model.fingerprint
    for each in built:
        each.close()
