"""Heads of checkpoints that would propose tokens: refused in one line that says which of their tensors are there."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.tiny import save_tiny
from twostroke.config import EAGLE3, HEAD_DRAFTERS, MTP, ModelConfig, ScheduleConfig
from twostroke.errors import ConfigError
from twostroke.models.draft_check import draft_dir, refuse_heads
from twostroke.models.draft_heads import DRAFT_HEADS, EAGLE3_HEAD, LAYER, MOST_PICKLE_BYTES, DraftHead, found_in

LAYERS = 3


class Touches:
    """Its pickle makes a file where somebody loads it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self._path, "w")


SIZES = {"H": 8, "V": 64, "D": 16, "A": 12, "K": 4, "F": 24, "L": 6}
DOCS = Path(__file__).resolve().parents[3] / "docs" / "speculation.md"
OF_MODEL = "model.layers.0.self_attn.o_proj.weight"


def saved(directory: Path, head: DraftHead, *, without: tuple[str, ...] = (), **shapes: tuple[int, ...]) -> Path:
    """Save a head's tensors, and one of a model's layers where the head stands in the model's own checkpoint."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": LAYERS}))
    tensors = {} if head is EAGLE3_HEAD else {OF_MODEL: torch.zeros(8, 12)}
    for general, shape in head.tensors.items():
        name = general.replace(LAYER, str(LAYERS))
        sizes = [int(spelled[:-1] or "1") * SIZES[spelled[-1]] for spelled in shape]
        tensors[name] = torch.zeros(shapes.get(name.split(".")[-2] if "." in name else name, sizes))
    save_file({name: tensor for name, tensor in tensors.items() if name not in without}, directory / "a.safetensors")
    return directory


def as_torch_saves(directory: Path, into: Path) -> Path:
    """Save the tensors of a directory in a file of torch's own, as EAGLE-3 heads are published."""
    into.mkdir()
    torch.save(load_file(directory / "a.safetensors"), into / "pytorch_model.bin")
    return into


def refusal(drafter: str, model: Path, draft: Path | None = None) -> str:
    schedule = ScheduleConfig(speculate=drafter, draft_model=None if draft is None else str(draft))
    with pytest.raises(ConfigError) as raised:
        refuse_heads(schedule, ModelConfig(model=str(model)), model)
    assert "\n" not in raised.value.message
    assert raised.value.field == "--speculate"
    return raised.value.message


@pytest.mark.parametrize("head", DRAFT_HEADS, ids=lambda head: head.title)
def test_a_checkpoint_with_all_tensors_of_a_head_is_refused_by_their_names(tmp_path: Path, head: DraftHead) -> None:
    directory = saved(tmp_path / "head", head)
    found = found_in(head, directory)
    assert (len(found.found), found.missing, found.misshapen) == (len(head.tensors), (), ())
    said = refusal(head.drafter, directory, directory if head is EAGLE3_HEAD else None)
    assert f"has all {len(head.tensors)} tensors of {head.title}" in said
    assert next(iter(head.tensors)).replace(LAYER, str(LAYERS)) in said
    assert "this build runs no head of a checkpoint yet" in said


def test_tensors_that_a_head_lacks_or_that_do_not_fit_are_named(tmp_path: Path) -> None:
    lacking = saved(tmp_path / "lacking", EAGLE3_HEAD, without=("d2t", "t2d"))
    assert "and lacks d2t, t2d" in refusal(EAGLE3, lacking, lacking)
    narrow = saved(tmp_path / "narrow", EAGLE3_HEAD, fc=(8, 16))
    assert "do not fit together (fc.weight)" in refusal(EAGLE3, narrow, narrow)


def test_a_head_in_a_file_of_torch_is_recognised_and_the_file_runs_nothing(tmp_path: Path) -> None:
    head = as_torch_saves(saved(tmp_path / "whole", EAGLE3_HEAD), tmp_path / "head")
    assert "has all 15 tensors of an EAGLE-3 head" in refusal(EAGLE3, head, head)
    with pytest.raises(ConfigError, match="is no model: it has all 15 tensors of an EAGLE-3 head"):
        draft_dir(str(head), "bfloat16")
    ran = tmp_path / "ran"
    torch.save({"weight": Touches(str(ran))}, head / "pytorch_model.bin")
    assert "has no tensor of an EAGLE-3 head" in refusal(EAGLE3, head, head)
    assert not ran.exists()
    (head / "pytorch_model.bin").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin cannot be read"):
        draft_dir(str(head), "bfloat16")


@pytest.mark.parametrize(
    ("method", "longest"),
    [(zipfile.ZIP_STORED, MOST_PICKLE_BYTES), (zipfile.ZIP_LZMA, 9)],
    ids=["that takes minutes to read", "whose compressed bytes raise what nobody expects"],
)
def test_a_pickle_is_refused_before_it_is_read(tmp_path: Path, method: int, longest: int) -> None:
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", method) as file:
        file.writestr("archive/data.pkl", b"N0" * longest)
    with pytest.raises(ConfigError, match=r"its pickle is compressed, or longer than 1048576 bytes$"):
        draft_dir(str(tmp_path), "bfloat16")


def test_a_model_without_a_head_is_refused_too(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    said = refusal(MTP, model)
    assert all(f"{head.title} (" in said for head in DRAFT_HEADS if head.drafter == MTP)
    assert "has no tensor of" in said
    assert f"no tensor of {EAGLE3_HEAD.title}" in refusal(EAGLE3, model, model)
    assert "is no directory here" in refusal(EAGLE3, model, Path("owner/head"))


def test_a_head_is_no_draft_model(tmp_path: Path) -> None:
    head = saved(tmp_path / "head", EAGLE3_HEAD)
    with pytest.raises(ConfigError, match="is no model: it has all 15 tensors of an EAGLE-3 head") as raised:
        draft_dir(str(head), "bfloat16")
    assert "\n" not in raised.value.message


def test_whoever_asks_for_no_head_is_not_refused(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    refuse_heads(ScheduleConfig(), ModelConfig(model=str(model)), model)


def test_the_docs_name_every_tensor_of_the_table() -> None:
    text = DOCS.read_text()
    for head in DRAFT_HEADS:
        assert head.drafter in HEAD_DRAFTERS
        for name, shape in {**head.tensors, **head.shared}.items():
            short = name.replace(LAYER, "N").removesuffix(".weight")
            assert f"`{short}` [{', '.join(shape)}]" in text, name
