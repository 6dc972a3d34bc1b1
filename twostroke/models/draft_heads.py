"""Heads of checkpoints that propose tokens: a table of their kinds, with the tensors that each needs. None is run yet.

A head is a small network beside a model: it reads hidden states of the model, and draws the tokens after the next one.
What is asked for here is refused in one line that says which of its tensors are there. No torch here.
"""

from __future__ import annotations

import json
import pickletools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from twostroke.config import EAGLE3, MTP
from twostroke.errors import ConfigError
from twostroke.models.weights.stored.tensor_header import read_headers

NOT_RUN: Final = "this build runs no head of a checkpoint yet"
MOST_PICKLE_BYTES: Final = 1 << 20
"""The longest pickle of torch's own files that is read: names and shapes of some thousand tensors, half a second."""
LAYER: Final = "{layer}"
"""Stands for the number of the model's layers: the head is the layer behind them."""
SHOWN: Final = 3
"""Tensors that a refusal names; of the others it gives the number."""

Shape = tuple[str, ...]
"""Sizes as letters, with a factor before: H hidden, V vocabulary, D vocabulary of drafts, A heads of queries, K heads
of keys and values, each times their width, F width of the feed-forward part, L rank of latents."""


@dataclass(frozen=True, slots=True)
class DraftHead:
    drafter: str
    """What `--speculate` calls it."""
    title: str
    tensors: Mapping[str, Shape]
    """Those that are its own; its layer's further matrices are called and shaped as those of the model's layers."""
    shared: Mapping[str, Shape]
    """Those that are the model's own where the checkpoint has them not."""
    source: str
    """The publication of its names and shapes."""


EAGLE3_HEAD: Final = DraftHead(
    EAGLE3,
    "an EAGLE-3 head",
    {
        "fc.weight": ("H", "3H"),
        "midlayer.hidden_norm.weight": ("H",),
        "midlayer.input_layernorm.weight": ("H",),
        "midlayer.post_attention_layernorm.weight": ("H",),
        "midlayer.self_attn.q_proj.weight": ("A", "2H"),
        "midlayer.self_attn.k_proj.weight": ("K", "2H"),
        "midlayer.self_attn.v_proj.weight": ("K", "2H"),
        "midlayer.self_attn.o_proj.weight": ("H", "A"),
        "midlayer.mlp.gate_proj.weight": ("F", "H"),
        "midlayer.mlp.up_proj.weight": ("F", "H"),
        "midlayer.mlp.down_proj.weight": ("H", "F"),
        "norm.weight": ("H",),
        "lm_head.weight": ("D", "H"),
        "d2t": ("D",),
        "t2d": ("V",),
    },
    {"embed_tokens.weight": ("V", "H")},
    "arXiv 2503.01840; checkpoints EAGLE3-LLaMA3.1-Instruct-8B and those of SpecForge",
)
_NEXTN: Final[Mapping[str, Shape]] = {
    f"model.layers.{LAYER}.enorm.weight": ("H",),
    f"model.layers.{LAYER}.hnorm.weight": ("H",),
    f"model.layers.{LAYER}.eh_proj.weight": ("H", "2H"),
    f"model.layers.{LAYER}.shared_head.norm.weight": ("H",),
    f"model.layers.{LAYER}.input_layernorm.weight": ("H",),
    f"model.layers.{LAYER}.post_attention_layernorm.weight": ("H",),
}
_NEXTN_SHARED: Final[Mapping[str, Shape]] = {
    f"model.layers.{LAYER}.embed_tokens.weight": ("V", "H"),
    f"model.layers.{LAYER}.shared_head.head.weight": ("V", "H"),
}
DRAFT_HEADS: Final = (
    EAGLE3_HEAD,
    DraftHead(
        MTP,
        "the MTP head of DeepSeek-V3",
        {
            **_NEXTN,
            f"model.layers.{LAYER}.self_attn.kv_a_layernorm.weight": ("L",),
            f"model.layers.{LAYER}.self_attn.o_proj.weight": ("H", "A"),
        },
        _NEXTN_SHARED,
        "README_WEIGHTS of DeepSeek-V3: layer 61 of num_nextn_predict_layers",
    ),
    DraftHead(
        MTP,
        "the MTP head of GLM-4.5",
        {
            **_NEXTN,
            f"model.layers.{LAYER}.self_attn.q_proj.weight": ("A", "H"),
            f"model.layers.{LAYER}.self_attn.k_proj.weight": ("K", "H"),
            f"model.layers.{LAYER}.self_attn.v_proj.weight": ("K", "H"),
            f"model.layers.{LAYER}.self_attn.o_proj.weight": ("H", "A"),
        },
        _NEXTN_SHARED,
        "checkpoints GLM-4.5 (layer 92) and GLM-4.5-Air (layer 46)",
    ),
    DraftHead(
        MTP,
        "the MTP head of Qwen3-Next",
        {
            "mtp.pre_fc_norm_embedding.weight": ("H",),
            "mtp.pre_fc_norm_hidden.weight": ("H",),
            "mtp.fc.weight": ("H", "2H"),
            "mtp.norm.weight": ("H",),
            "mtp.layers.0.input_layernorm.weight": ("H",),
            "mtp.layers.0.post_attention_layernorm.weight": ("H",),
            "mtp.layers.0.self_attn.q_proj.weight": ("2A", "H"),
            "mtp.layers.0.self_attn.k_proj.weight": ("K", "H"),
            "mtp.layers.0.self_attn.v_proj.weight": ("K", "H"),
            "mtp.layers.0.self_attn.o_proj.weight": ("H", "A"),
        },
        {},
        "checkpoint Qwen3-Next-80B-A3B-Instruct",
    ),
)
"""Kinds of heads."""


@dataclass(frozen=True, slots=True)
class FoundHead:
    """What a checkpoint has of one kind of head."""

    head: DraftHead
    found: tuple[str, ...]
    missing: tuple[str, ...]
    misshapen: tuple[str, ...]
    """Tensors that are there with sizes that do not fit to those of the others."""

    def __str__(self) -> str:
        if self.misshapen:
            return f"has tensors of {self.head.title} of which some do not fit together ({_named(self.misshapen)})"
        if self.missing:
            return f"has tensors of {self.head.title} ({_named(self.found)}) and lacks {_named(self.missing)}"
        return f"has all {len(self.found)} tensors of {self.head.title} ({_named(self.found)})"


def refuse_head(drafter: str, name: str, directory: Path | None) -> None:
    """Raises ConfigError, one line, that says what the checkpoint in a directory has of a head that is asked for.

    `name` is the checkpoint's, as the command line says it; without a directory its tensors are not known.
    """
    heads = [head for head in DRAFT_HEADS if head.drafter == drafter]
    if directory is None:
        said = f"{name} is no directory here, so its tensors are not known"
    else:
        seen = [found_in(head, directory) for head in heads]
        best = max(seen, key=lambda each: len(each.found) - len(each.missing) / 100)
        none_of = [f"{each.head.title} ({each.missing[0]} ...)" for each in seen if not each.found]
        said = f"{name} {best}" if best.found else f"{name} has no tensor of {', '.join(none_of)}"
    raise ConfigError(f"--speculate {drafter}: {NOT_RUN}; {said}", field="--speculate")


def refuse_head_as_model(flag: str, name: str, directory: Path) -> None:
    """Raises ConfigError where a directory that is to hold a whole model holds a head alone."""
    names = _shapes_in(directory)
    if any(tensor.endswith("layers.0.self_attn.o_proj.weight") and "mtp" not in tensor for tensor in names):
        return
    seen = [found_in(head, directory) for head in DRAFT_HEADS]
    best = max(seen, key=lambda each: len(each.found))
    if best.found:
        raise ConfigError(f"{flag} {name} is no model: it {best}, and {NOT_RUN}", field=flag)


def found_in(head: DraftHead, directory: Path) -> FoundHead:
    """Read which tensors of a head the files of a directory have, and whether their sizes fit together.

    Raises ConfigError where a file is damaged.
    """
    stored, layers = _shapes_in(directory), _layers_in(directory)
    needed = {name.replace(LAYER, str(layers)): shape for name, shape in head.tensors.items()}
    optional = {name.replace(LAYER, str(layers)): shape for name, shape in head.shared.items()}
    found = [name for name in needed if name in stored]
    present = {name: shape for name, shape in (needed | optional).items() if name in stored}
    if head is EAGLE3_HEAD and not any(name.startswith("midlayer.") for name in found):
        found, present = [], {}  # every model has the others
    return FoundHead(
        head,
        tuple(found),
        tuple([name for name in needed if name not in found]),
        tuple(_misshapen(present, stored)),
    )


def _shapes_in(directory: Path) -> dict[str, tuple[int, ...] | None]:
    """Return the tensors of a directory's safetensors files; where it has none, the names in torch's own files.

    Some EAGLE-3 heads are published in the latter. Their shapes are not read.
    """
    shapes: dict[str, tuple[int, ...] | None] = {name: found.shape for name, found in read_headers(directory).items()}
    return shapes or dict.fromkeys(_names_in_torch_files(directory))


def _names_in_torch_files(directory: Path) -> set[str]:
    """Return all text in the pickles of torch's own files, of which nothing is run. Names of tensors are among it."""
    names: set[str] = set()
    for path in sorted(directory.glob("pytorch_model*.bin")):
        try:
            with zipfile.ZipFile(path) as file:
                (entry,) = [entry for entry in file.infolist() if entry.filename.endswith("/data.pkl")]
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > MOST_PICKLE_BYTES:
                    raise ValueError(f"its pickle is compressed, or longer than {MOST_PICKLE_BYTES} bytes")
                pickle = file.read(entry)
            names.update(argument for _, argument, _ in pickletools.genops(pickle) if isinstance(argument, str))
        except (OSError, EOFError, ValueError, NotImplementedError, RuntimeError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path} cannot be read: {error}", field="model") from error
    return names


def _misshapen(shapes: Mapping[str, Shape], stored: Mapping[str, tuple[int, ...] | None]) -> list[str]:
    """Return the tensors whose sizes differ from what the sizes before them say, norms first."""
    sizes: dict[str, int] = {}
    wrong: list[str] = []
    for name, shape in sorted(shapes.items(), key=lambda item: len(item[1])):
        own = stored[name]
        if own is None:
            continue
        fits = len(own) == len(shape)
        for size, spelled in zip(own, shape, strict=False):
            factor, letter = int(spelled[:-1] or "1"), spelled[-1]
            fits = fits and size == factor * sizes.setdefault(letter, size // factor)
        wrong += [] if fits else [name]
    return wrong


def _layers_in(directory: Path) -> int:
    """Return the number of the model's layers by its config; 0 where it says none."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        return int(config.get("num_hidden_layers") or 0)
    except (OSError, ValueError, AttributeError, TypeError):
        return 0


def _named(tensors: tuple[str, ...]) -> str:
    more = len(tensors) - SHOWN
    return ", ".join(tensors[:SHOWN]) + (f" and {more} more" if more > 0 else "")
