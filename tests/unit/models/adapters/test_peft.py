from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lora import CONFIG, SMALL, Tensors, random_tensors, tensor_name, write_adapter
from twostroke.base.errors import ConfigError
from twostroke.models.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, read_adapter

A, B = (tensor_name(0, "q_proj", side) for side in "AB")


def test_an_adapter_is_read_with_its_scale_and_the_numbers_of_each_projection(tmp_path: Path) -> None:
    tensors = random_tensors()
    adapter = read_adapter(write_adapter(tmp_path, tensors))
    assert (adapter.lora_rank, adapter.scale, len(adapter.parts)) == (4, 2.0, 14)
    np.testing.assert_array_equal(adapter.parts[0, "q_proj"].a, tensors[A])
    np.testing.assert_array_equal(adapter.parts[0, "q_proj"].b, tensors[B])
    adapter.check_fits(SMALL)


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_their_rank(tmp_path: Path) -> None:
    assert read_adapter(write_adapter(tmp_path, use_rslora=True)).scale == 4.0


def test_half_precision_is_read_exactly(tmp_path: Path) -> None:
    tensors: Tensors = {name: tensor.astype(np.float16) for name, tensor in random_tensors().items()}
    adapter = read_adapter(write_adapter(tmp_path, tensors))
    np.testing.assert_array_equal(adapter.parts[0, "q_proj"].a, tensors[A].astype(np.float32))


def test_bfloat16_is_read_exactly(tmp_path: Path) -> None:
    header = {A: ("BF16", [4, 8]), B: ("BF16", [8, 4])}
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(_file(header, np.full(64, 0x3FC0, np.uint16).tobytes()))
    assert (read_adapter(tmp_path).parts[0, "q_proj"].b == 1.5).all()


def test_fused_projections_become_their_parts(tmp_path: Path) -> None:
    noise = np.random.default_rng(1)
    shapes = {"qkv_proj": (8, 16), "gate_up_proj": (8, 24)}
    tensors: Tensors = {}
    for name, (inputs, outputs) in shapes.items():
        place = "self_attn" if name == "qkv_proj" else "mlp"
        for side, shape in (("A", (4, inputs)), ("B", (outputs, 4))):
            full = f"base_model.model.model.layers.1.{place}.{name}.lora_{side}.weight"
            tensors[full] = noise.standard_normal(shape).astype(np.float32)
    adapter = read_adapter(write_adapter(tmp_path, tensors))
    adapter.check_fits(SMALL)
    assert sorted(name for _, name in adapter.parts) == ["gate_proj", "k_proj", "q_proj", "up_proj", "v_proj"]
    fused = tensors["base_model.model.model.layers.1.self_attn.qkv_proj.lora_B.weight"]
    np.testing.assert_array_equal(adapter.parts[1, "v_proj"].b, fused[12:])


def test_the_digest_follows_what_is_computed_and_nothing_else(tmp_path: Path) -> None:
    def digest(name: str, tensors: Tensors | None = None, **config: Any) -> bytes:
        return read_adapter(write_adapter(tmp_path / name, tensors, **config)).digest

    same = digest("first")
    assert digest("other words", base_model_name_or_path="elsewhere", target_modules="all-linear") == same
    assert digest("other weights", random_tensors(seed=1)) != same
    assert digest("other scale", lora_alpha=16) != same


@pytest.mark.parametrize("place", [(0, 0), (3, 5000), (1, -1), (3, -1)])
def test_the_digest_sees_every_number_of_a_large_tensor(tmp_path: Path, place: tuple[int, int]) -> None:
    """It has 96 KiB, more than anything that reads it in parts takes at once."""
    large: Tensors = {**random_tensors(), A: np.ones((4, 6000), np.float32)}
    before = read_adapter(write_adapter(tmp_path / "before", large)).digest
    large[A][place] += 1
    assert read_adapter(write_adapter(tmp_path / "after", large)).digest != before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOHA"), ("peft_type", None), ("r", 0), ("r", 513), ("r", "8"), ("r", True), ("r", 4.0),
        ("lora_alpha", None), ("lora_alpha", "x"), ("lora_alpha", float("nan")), ("lora_alpha", float("inf")),
        ("use_dora", True), ("bias", "all"), ("bias", "lora_only"), ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 8}), ("alpha_pattern", {"q_proj": 8}), ("layer_replication", [[0, 2]]),
        ("fan_in_fan_out", True), ("lora_bias", True), ("use_qalora", True), ("trainable_token_indices", [1]),
        ("target_parameters", ["experts"]), ("alora_invocation_tokens", [1]), ("init_lora_weights", "pissa"),
        ("init_lora_weights", "loftq"), ("corda_config", {"a": 1}), ("use_rslora", "yes"), ("new_trick", 1),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_its_key_in_one_line(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        read_adapter(write_adapter(tmp_path, **{key: value}))
    words = {"r": "r (the adapter rank)"}.get(key, key)
    assert words in refused.value.message
    assert "\n" not in refused.value.message


def _without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def _with(name: str, tensor: Any) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


ZEROS = np.zeros((4, 8), np.float32)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_without(A), "lora_B alone"),
        (_without(B), "lora_A alone"),
        (_with(A, np.zeros((3, 8), np.float32)), "shape"),
        (_with(A, np.zeros(8, np.float32)), "shape"),
        (_with(A, np.zeros((4, 0), np.float32)), "shape"),
        (_with(B, np.zeros((4, 8), np.float32)), "shape"),
        (_with(A, np.full((4, 8), np.nan, np.float32)), "not finite"),
        (_with(A, np.full((4, 8), np.inf, np.float16)), "not finite"),
        (_with(A, np.zeros((4, 8), np.int32)), "dtype"),
        (_with(A, np.zeros((4, 8), np.float64)), "dtype"),
        (_with("base_model.model.lm_head.lora_A.weight", ZEROS), "lm_head"),
        (_with("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", ZEROS), "not computed"),
        (_with("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", ZEROS), "not computed"),
        (_with("base_model.model.model.layers.0.self_attn.x_proj.lora_A.weight", ZEROS), "not computed"),
        (_with("base_model.model.model.layers.-1.self_attn.q_proj.lora_A.weight", ZEROS), "not computed"),
    ],
)
def test_broken_tensors_are_refused_in_one_line(tmp_path: Path, change: Callable[[Tensors], None], why: str) -> None:
    tensors = random_tensors()
    change(tensors)
    with pytest.raises(ConfigError) as refused:
        read_adapter(write_adapter(tmp_path, tensors))
    assert why in refused.value.message
    assert "\n" not in refused.value.message


def _file(header: Any, data: bytes, length: int | None = None) -> bytes:
    if isinstance(header, dict):
        at, described = 0, {}
        for name, entry in header.items():
            if isinstance(entry, tuple):
                size = int(np.prod(entry[1])) * 2
                described[name] = {"dtype": entry[0], "shape": entry[1], "data_offsets": [at, at + size]}
                at += size
            else:
                described[name] = entry
        header = json.dumps(described).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


PAIR = {A: ("F16", [4, 8]), B: ("F16", [8, 4])}
ENTRY = {"dtype": "F16", "shape": [4, 8], "data_offsets": [0, 64]}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"short", _file(PAIR, b""), _file(PAIR, bytes(127)), _file(PAIR, bytes(129)), _file(b"{", bytes(8)),
        _file(b"[]", b""), _file(PAIR, bytes(128), 1 << 62), _file(PAIR, bytes(128), 4), _file({A: "text"}, b""),
        _file({A: {**ENTRY, "data_offsets": [64, 0]}}, bytes(64)),
        _file({A: {**ENTRY, "data_offsets": [0]}}, bytes(64)),
        _file({A: {**ENTRY, "data_offsets": [-64, 0]}}, bytes(64)), _file({A: {**ENTRY, "shape": [-4, -8]}}, bytes(64)),
        _file({A: {**ENTRY, "shape": [1 << 40, 1 << 40]}}, bytes(64)), _file({A: {**ENTRY, "dtype": None}}, bytes(64)),
        _file({A: {**ENTRY, "dtype": ["F16"]}}, bytes(64)), _file({A: ENTRY, B: ENTRY}, bytes(64)),
        _file({A: {**ENTRY, "shape": [4.0, 8]}}, bytes(64)), _file({}, b""), _file(b"[" * 200_000, b""),
        pickle.dumps({A: [0.0]}), b"PK\x03\x04" + bytes(64),
    ],
    ids=range(23),
)  # fmt: skip
def test_files_that_are_no_tensors_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        read_adapter(tmp_path)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', "[" * 200_000, "\udcff"])
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    write_adapter(tmp_path)
    (tmp_path / CONFIG_FILE).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=CONFIG_FILE):
        read_adapter(tmp_path)


def test_missing_files_are_named_and_pickles_are_never_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=CONFIG_FILE):
        read_adapter(tmp_path)
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS_FILE).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ConfigError, match="pickle"):
        read_adapter(tmp_path)


def test_a_queue_in_the_place_of_a_file_stops_nobody(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    os.mkfifo(tmp_path / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match=WEIGHTS_FILE):
        read_adapter(tmp_path)


def test_an_adapter_of_another_model_is_refused_by_the_projection(tmp_path: Path) -> None:
    tensors = random_tensors(projections=["q_proj"])
    tensors[tensor_name(1, "down_proj", "A")] = np.zeros((4, 16), np.float32)
    tensors[tensor_name(1, "down_proj", "B")] = np.zeros((8, 4), np.float32)
    with pytest.raises(ConfigError, match=r"layers\.1\.down_proj"):
        read_adapter(write_adapter(tmp_path, tensors)).check_fits(SMALL)
    tensors = {name.replace("layers.1", "layers.2"): tensor for name, tensor in random_tensors().items()}
    with pytest.raises(ConfigError, match="layer 2"):
        read_adapter(write_adapter(tmp_path, tensors)).check_fits(SMALL)


def test_a_rank_above_the_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="from 1 to 2"):
        read_adapter(write_adapter(tmp_path), most_lora_rank=2)
    assert CONFIG["r"] == 4
