"""Tensors of a model's files that the model does not compute with: harmless, refused by name, or named in a warning.

A tensor that is left over in a module of the model shows that config.json describes another model than the files hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from twostroke.base.errors import ConfigError
from twostroke.models.families.table import FAMILIES, named
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.files import stored_name
from twostroke.models.weights.fused_experts import FusedExpert
from twostroke.models.weights.stored.coded_matrices import CodedMatrices, coded_in
from twostroke.models.weights.stored.gguf_file import GgufFile, GgufTensor, read_gguf
from twostroke.models.weights.stored.gguf_names import GgufPlace, gguf_place
from twostroke.models.weights.stored.model_files import gguf_in
from twostroke.models.weights.stored.tensor_header import HeaderTensor, read_headers
from twostroke.models.weights.tensors import take_weights

HARMLESS: Final = re.compile(
    r"(.+\.)?("
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids"  # made from the config
    r"|rope_freqs\.weight|rope_factors_(long|short)\.weight"
    r"|(attn|attention)\.(bias|masked_bias|causal_mask)"  # masks of GPT-2 and GPT-NeoX
    r"|(input|output|k|v|kv|q|prob|prob_output)_scale|(input|output|k|v|q)_zero_point"  # of rounded activations
    r"|weight_shape"
    r")"
)
"""Names of tensors that have no influence on an answer, or that repeat the config."""
NAMED: Final = 3
"""Most names of tensors in one message."""
PIECE_BYTES: Final = 64 << 20
"""Bytes of each of two tensors that are compared at a time."""


def check_family_tensors(directory: Path, spec: ModelSpec) -> str | None:
    """Returns the sentence that names tensors of no module of the model; None where there are none.

    It reads only headers, except for biases, and for a head in the files of a model with a tied head. Raises
    ConfigError for a tensor that contradicts the config.
    """
    files = _Files.of(directory)
    asked = _asked(spec)
    read = {place for name in asked for place in files.places(name)}
    files.check_experts(asked)
    left = files.tensors.keys() - read
    head = min(files.places(_file_name(spec, "lm_head")), default=None)
    if spec.tie_word_embeddings and head in left:
        files.check_tied(head, min(files.places(_file_name(spec, "model.embed_tokens"))))
        left -= {head}
    zeros = {name for name in left if name.endswith(".bias") and not files.content(name).any()}
    return check_left(directory, left - zeros, {*read, files.in_file(_file_name(spec, "lm_head"))})


def check_left(directory: Path, left: Iterable[str], read: Iterable[str]) -> str | None:
    """Returns the sentence that names what is `left` of the tensors in files; None where all of it is harmless.

    `read` are the tensors that the model computes with. Raises ConfigError for what is left in modules of the model.
    """
    further = _predicted_layers(directory)
    unknown = [name for name in left if not HARMLESS.fullmatch(name) and not (further and further.fullmatch(name))]
    modules = {name.partition(".")[0] for name in read}
    wrong = [name for name in unknown if name.partition(".")[0] in modules]
    if wrong:
        raise ConfigError(
            f"{directory}: its weights have {_few(wrong)}, which the model of config.json does not compute with: "
            "correct config.json, or take these tensors out of the files",
            field="model",
        )
    return f"{directory}: nothing reads {_few(unknown)}" if unknown else None


def _few(names: Collection[str]) -> str:
    few = ", ".join(" ".join(name.split())[:120] for name in sorted(names)[:NAMED])
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"tensor{'s' * (len(names) > 1)} {few}{more}"


def _predicted_layers(directory: Path) -> re.Pattern[str] | None:
    """Returns the pattern of tensors in layers that predict further tokens, which follow the model's own (DeepSeek
    V3)."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    layers, further = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not isinstance(layers, int) or not isinstance(further, int) or further < 1:
        return None
    numbers = "|".join(str(layers + index) for index in range(further))
    return re.compile(rf"(model\.layers|layers|blk)\.({numbers})\..+")


def _file_name(spec: ModelSpec, module: str) -> str:
    return f"{FAMILIES[spec.architecture].name_of(module)}.weight"


class _AskedNames:
    """A source of tensors without numbers. It records their names in the family's files."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Records the name. Returns a tensor of this shape without numbers."""
        self.names.add(name)
        return torch.empty(shape, device="meta")

    def take_matrix(self, name: str, rows: int, inputs: int) -> torch.Tensor:
        """Records the name. Returns a matrix of this shape without numbers."""
        return self.take(name, rows, inputs)


def _asked(spec: ModelSpec) -> set[str]:
    """Returns the names of all tensors that the model computes with, as its family's files have them."""
    asked = _AskedNames()
    take_weights(named(asked, spec), spec, with_head=True)
    return asked.names


@dataclass(frozen=True, slots=True)
class _Files:
    """The headers of a model's weight files."""

    directory: Path
    tensors: Mapping[str, HeaderTensor | GgufTensor]
    gguf: GgufFile | None
    coded: CodedMatrices | None

    @classmethod
    def of(cls, directory: Path) -> _Files:
        path = gguf_in(directory)
        if path is None:
            return cls(directory, read_headers(directory), None, coded_in(directory))
        gguf = read_gguf(path)
        return cls(directory, gguf.tensors, gguf, None)

    def places(self, name: str) -> set[str]:
        """Returns the names of the tensors in the files that hold the family's tensor `name`; an empty set if there are
        none."""
        if self.gguf is not None:
            return {gguf_place(self.gguf.architecture, name).name} & self.tensors.keys()
        matrix = None if self.coded is None else self.coded.find(name)
        if matrix is not None:
            stem = name.removesuffix(".weight") + "." if matrix.fused is None else f"{matrix.fused.name}_"
            return {f"{stem}{part}" for part in matrix.parts}
        place = stored_name(name, self.tensors)
        fused = FusedExpert.of(place, self.tensors)
        return ({place} if place in self.tensors or fused is None else {fused.name}) & self.tensors.keys()

    def in_file(self, name: str) -> str:
        """Returns the name that a tensor has, or would have, in the files if it is not quantised."""
        return name if self.gguf is None else gguf_place(self.gguf.architecture, name).name

    def check_experts(self, names: Iterable[str]) -> None:
        """Raises ConfigError where a tensor of all experts of a layer has another number of them than the model asks
        for."""
        counts: dict[str, int] = {}
        for name in names:
            place = self._of_experts(name)
            if place is not None and place.expert is not None and place.name in self.tensors:
                counts[place.name] = max(counts.get(place.name, 0), place.expert + 1)
        for name, count in sorted(counts.items()):
            experts = self.tensors[name].shape[0]
            if experts != count:
                raise ConfigError(
                    f"{self.directory}: tensor {name} has {experts} experts, those of config.json are {count}: "
                    "correct config.json",
                    field="model",
                )

    def _of_experts(self, name: str) -> GgufPlace | None:
        """Returns the tensor that may hold all experts of a layer, and the index of this expert in it."""
        if self.gguf is not None:
            return gguf_place(self.gguf.architecture, name)
        matrix = None if self.coded is None else self.coded.find(name)
        if matrix is not None:
            return None if matrix.fused is None else GgufPlace(f"{matrix.fused.name}_blocks", matrix.fused.expert)
        place = stored_name(name, self.tensors)
        fused = None if place in self.tensors else FusedExpert.of(place, self.tensors)
        return None if fused is None else GgufPlace(fused.name, fused.expert)

    def check_tied(self, head: str, table: str) -> None:
        """Raises ConfigError where the head in the files differs from the embedding that is used for it."""
        ours, theirs = self.content(head), self.content(table)
        is_same = self.tensors[head].shape == self.tensors[table].shape and len(ours) == len(theirs)
        for start in range(0, len(ours), PIECE_BYTES):
            piece = slice(start, start + PIECE_BYTES)
            is_same = is_same and np.array_equal(ours[piece], theirs[piece])
        if not is_same:
            raise ConfigError(
                f"{self.directory}: tensor {head} differs from {table}, to which config.json ties it "
                "(tie_word_embeddings is true). Set tie_word_embeddings to false to serve the head of the files, or "
                "take that tensor out of them",
                field="model",
            )

    def content(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the bytes of a tensor, mapped."""
        tensor = self.tensors[name]
        if isinstance(tensor, HeaderTensor):
            path = tensor.path
        else:
            assert self.gguf is not None, "it is a tensor of this file"
            path = self.gguf.path
        return np.memmap(path, np.uint8, "r", tensor.start, (tensor.size_bytes,))
