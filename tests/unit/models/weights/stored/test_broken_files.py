"""Damaged and hostile weight files are refused in one line, without torch and before a worker starts."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.unit.models.test_registry import saved
from tests.unit.models.weights.stored.coded_models import FORMATS, describe, quantised
from tests.unit.models.weights.stored.gguf_models import SIZES, written
from twostroke.base.errors import ConfigError
from twostroke.models.catalog.places import check_files
from twostroke.models.weights.stored.check import check_weights
from twostroke.models.weights.stored.gguf_file import read_gguf


@dataclass(frozen=True)
class Damage:
    """Something done to a whole file, and a part of the line that refuses it."""

    said: str
    do: Callable[[Path], None]


def _bytes(change: Callable[[bytearray], bytes | bytearray]) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(change(bytearray(path.read_bytes()))), None)[1]


def _at(place: int, kind: str, value: Any) -> Callable[[Path], None]:
    def change(content: bytearray) -> bytearray:
        struct.pack_into(kind, content, place, value)
        return content

    return _bytes(change)


def _field(name: str, skip: int, kind: str, value: Any) -> Callable[[Path], None]:
    """Changes a number that comes so many bytes behind the name of a tensor in the header."""

    def change(content: bytearray) -> bytearray:
        struct.pack_into(kind, content, content.index(name.encode()) + len(name) + skip, value)
        return content

    return _bytes(change)


def _scale(name: str, offset: int, value: float) -> Callable[[Path], None]:
    """Changes a float16 of the first block of a tensor."""

    def do(path: Path) -> None:
        place = read_gguf(path).tensors[name].start + offset
        content = bytearray(path.read_bytes())
        struct.pack_into("<e", content, place, value)
        path.write_bytes(content)

    return do


LLAMA: Final = b"\x05\0\0\0\0\0\0\0llama"
"""The value of general.architecture."""
Q_PROJ: Final = "blk.0.attn_q.weight"
UP: Final = "blk.1.ffn_up.weight"
UNSERVED: Final = "model.gguf cannot be read as GGUF: "
GGUF: Final = {
    "empty": Damage(UNSERVED, _bytes(lambda _: b"")),
    "another magic": Damage("GGUF magic invalid", _at(0, "<4s", b"GGML")),
    "an old version": Damage("version 1 ", _at(4, "<I", 1)),
    "big endian": Damage(UNSERVED, _at(4, ">I", 3)),
    "huge count of tensors": Damage(UNSERVED, _at(8, "<Q", 1 << 62)),
    "huge count of facts": Damage(UNSERVED, _at(16, "<Q", 1 << 62)),
    "more tensors than there are": Damage(UNSERVED, _at(8, "<Q", 50)),
    "a huge name": Damage(UNSERVED, _at(24, "<Q", 1 << 40)),
    "cut in its header": Damage(UNSERVED, _bytes(lambda content: content[:200])),
    "cut in its tensors": Damage(UNSERVED, _bytes(lambda content: content[:-4000])),
    "no dimensions": Damage(UNSERVED, _field(Q_PROJ, 0, "<I", 0)),
    "many dimensions": Damage(UNSERVED, _field(Q_PROJ, 0, "<I", 1_000_000)),
    "an empty tensor": Damage("has type Q8_0 and shape (64, 0)", _field(Q_PROJ, 4, "<Q", 0)),
    "no whole blocks": Damage(UNSERVED, _field(Q_PROJ, 4, "<Q", 63)),
    "a product that overflows": Damage(UNSERVED, _field(Q_PROJ, 4, "<Q", 1 << 63)),
    "rows beyond the file": Damage(UNSERVED, _field(Q_PROJ, 12, "<Q", 1 << 30)),
    "an unknown type": Damage("4242", _field(Q_PROJ, 20, "<I", 4242)),
    "a type that is not served": Damage("Q2_K", _field(Q_PROJ, 20, "<I", 10)),
    "an offset beyond the file": Damage(UNSERVED, _field(UP, 24, "<Q", 1 << 40)),
    "an offset that wraps": Damage(UNSERVED, _field(UP, 24, "<Q", (1 << 64) - 32)),
    "an uneven offset": Damage("overlaps the one before it", _field(UP, 24, "<Q", 7)),
    "tensors that overlap": Damage("overlaps the one before it", _field(UP, 24, "<Q", 0)),
    "a tensor twice": Damage(
        "duplicated", _bytes(lambda content: content.replace(b"blk.1.ffn_up.w", b"blk.0.ffn_up.w"))
    ),
    "a scale of NaN": Damage(f"tensor {UP} has a scale that is not a number", _scale(UP, 0, float("nan"))),
    "a scale of infinity": Damage("has a scale that is not a number", _scale(Q_PROJ, 0, float("inf"))),
    "another architecture": Damage(
        "'clip0' is not served", _bytes(lambda c: c.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0clip0", 1))
    ),
    "no embedding": Damage("token_embd.weight", _bytes(lambda c: c.replace(b"token_embd", b"token_emba"))),
}


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(LlamaConfig(**SIZES), "llama", tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("name", GGUF)
def test_a_broken_gguf_file_is_refused_in_one_line(name: str, whole_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(whole_gguf.read_bytes())
    check_weights(tmp_path)
    GGUF[name].do(tmp_path / "model.gguf")
    _refused(tmp_path, GGUF[name].said)


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Changes the JSON of a file's header, and leaves its tensors."""

    def do(directory: Path) -> None:
        path = directory / "model.safetensors"
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        new = json.dumps(change(header) or header).encode()
        path.write_bytes(len(new).to_bytes(8, "little") + new + content[8 + length :])

    return do


def _weights(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """The change of a file, made in a directory's weights."""
    return lambda directory: change(directory / "model.safetensors")


def _tensor(name: str, **facts: Any) -> Callable[[Path], None]:
    return _header(lambda header: header[name].update(facts))


def _numbers(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    """Changes a tensor; without one where None comes of it."""

    def do(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        changed = change(tensors.pop(name))
        save_file(tensors | ({} if changed is None else {name: changed.contiguous()}), directory / "model.safetensors")

    return do


def _with_one(tensor: torch.Tensor, place: int, value: float) -> torch.Tensor:
    tensor.view(-1)[place] = value
    return tensor


def _options(**options: Any) -> Callable[[Path], None]:
    return lambda directory: describe(directory, FORMATS["GPTQ, zeros"].options | options)


def _index(content: str) -> Callable[[Path], None]:
    def do(directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
        (directory / "model.safetensors.index.json").write_text(content, encoding="utf-8")

    return do


MODULE: Final = "model.layers.0.mlp.up_proj"
SCALES: Final = f"{MODULE}.scales"
OUTSIDE: Final = "not a weight file beside it"
UNREAD: Final = "model.safetensors cannot be read: "
CODED: Final = {
    "a short file": Damage(UNREAD, _weights(_bytes(lambda _: b"abc"))),
    "a huge header": Damage(UNREAD, _weights(_at(0, "<Q", 1 << 62))),
    "a header that is no JSON": Damage(UNREAD, _weights(_at(8, "<4s", b"\xff{{{"))),
    "a header that is a list": Damage(UNREAD, _header(lambda _: [1])),
    "tensors cut off": Damage(UNREAD, _weights(_bytes(lambda c: c[:-500]))),
    "a tensor beyond the file": Damage(
        UNREAD, _header(lambda h: h[SCALES].update(data_offsets=[1 << 40, (1 << 40) + 384]))
    ),
    "tensors over each other": Damage(UNREAD, _header(lambda h: h[SCALES].update(data_offsets=[0, 384]))),
    "an offset below zero": Damage(UNREAD, _header(lambda h: h[SCALES].update(data_offsets=[-384, 0]))),
    "a shape that does not fit": Damage(UNREAD, _tensor(SCALES, shape=[1 << 60, 16])),
    "an unknown type": Damage(UNREAD, _tensor(SCALES, dtype="F3")),
    "a tensor without a place": Damage(UNREAD, _tensor(SCALES, data_offsets=None)),
    "scales of another shape": Damage(f"{MODULE} cannot be read", _numbers(SCALES, lambda t: t[:, :32])),
    "no scales": Damage("has no scales", _numbers(SCALES, lambda _: None)),
    "no zeros": Damage("has no qzeros", _numbers(f"{MODULE}.qzeros", lambda _: None)),
    "zeros of another shape": Damage("has qzeros of shape", _numbers(f"{MODULE}.qzeros", lambda t: t[:1])),
    "groups of other inputs": Damage("has g_idx of shape", _numbers(f"{MODULE}.g_idx", lambda t: t[:8])),
    "codes of another type": Damage(
        "has qweight of type U8", _numbers(f"{MODULE}.qweight", lambda t: t.to(torch.uint8))
    ),
    "codes of one dimension": Damage("has qweight of type", _numbers(f"{MODULE}.qweight", lambda t: t.flatten())),
    "a scale of NaN": Damage("scale that is not a number", _numbers(SCALES, lambda t: t.fill_(torch.nan))),
    "one scale of NaN among all others": Damage(
        "scale that is not a number", _numbers(SCALES, lambda t: _with_one(t, -1, torch.nan))
    ),
    "one endless scale among all others": Damage(
        "scale that is not a number", _numbers(SCALES, lambda t: _with_one(t, 5, -torch.inf))
    ),
    "another method": Damage("quantised weights (hqq) are not served", _options(quant_method="hqq")),
    "another number of bits": Damage("quantization_config.bits = 3 is not served", _options(bits=3)),
    "a number of bits that is text": Damage("quantization_config.bits = '4' is not served", _options(bits="4")),
    "groups of nothing": Damage("quantization_config.group_size = 0 is not served", _options(group_size=0)),
    "an option nobody knows": Damage("quantization_config.dynamic = ", _options(dynamic={"-:lm_head": {}})),
    "options that are a list": Damage("is not an object", lambda directory: describe(directory, [1])),
    "a pattern that is none": Damage("modules_to_not_convert = 're:('", _options(modules_to_not_convert=["re:("])),
    "ignored, yet quantised": Damage("says that it is not", _options(modules_to_not_convert=["up_proj"])),
    "an index that is cyclic": Damage(
        "not a weight file beside it", _index('{"weight_map": {"a": "model.safetensors.index.json"}}')
    ),
    "an index that leads out": Damage(
        "not a weight file beside it", _index('{"weight_map": {"a": "../../x.safetensors"}}')
    ),
    "an index that is absolute": Damage(
        "not a weight file beside it", _index('{"weight_map": {"a": "/etc/x.safetensors"}}')
    ),
    "an index that is not text": Damage(OUTSIDE, _index('{"weight_map": {"a": 7}}')),
    "an index too deep": Damage("not an index", _index("[" * 100_000)),
}


@pytest.fixture(scope="module")
def whole_coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("coded")
    saved(LlamaConfig(**SIZES), directory)
    quantised(directory, FORMATS["GPTQ, zeros"])
    return directory


@pytest.mark.parametrize("name", CODED)
def test_broken_safetensors_are_refused_in_one_line(name: str, whole_coded: Path, tmp_path: Path) -> None:
    for file in whole_coded.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    check_weights(tmp_path)
    CODED[name].do(tmp_path)
    _refused(tmp_path, CODED[name].said)


def test_no_cut_of_a_header_reads_out_of_bounds(whole_gguf: Path, tmp_path: Path) -> None:
    content = whole_gguf.read_bytes()
    begin = min(tensor.start for tensor in read_gguf(whole_gguf).tensors.values())
    for end in range(0, begin, 97):
        (tmp_path / "model.gguf").write_bytes(content[:end])
        _refused(tmp_path, "")


def test_no_changed_byte_of_a_header_raises_anything_else(whole_gguf: Path, tmp_path: Path) -> None:
    content = bytearray(whole_gguf.read_bytes())
    begin = min(tensor.start for tensor in read_gguf(whole_gguf).tensors.values())
    draw = np.random.default_rng(0)
    for _ in range(150):
        changed = bytearray(content)
        for place in draw.integers(0, begin, 3):
            changed[place] = draw.integers(0, 256)
        (tmp_path / "model.gguf").write_bytes(changed)
        with contextlib.suppress(ConfigError):
            check_weights(tmp_path)


def _refused(directory: Path, said: str) -> None:
    check = check_files if (directory / "model.safetensors.index.json").exists() else check_weights
    with pytest.raises(ConfigError) as refusal:
        check(directory)
    line = str(refusal.value)
    assert said in line
    assert "\n" not in line
