"""Reads an adapter from a folder that PEFT wrote: `adapter_config.json` and `adapter_model.safetensors`.

An adapter that asks for more than is computed is refused, and the error names the key. If it were read in part, its
answers would be wrong without notice.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from twostroke.base.errors import ConfigError
from twostroke.models.adapters.shapes import FUSED, PROJECTIONS, ProjectionShapes

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
PICKLED_FILE: Final = "adapter_model.bin"
DIGEST_BYTES: Final = 16
MOST_LORA_RANK: Final = 512
"""The greatest adapter rank; vLLM serves no greater one."""
MOST_CONFIG_BYTES: Final = 1 << 20
MOST_WEIGHT_BYTES: Final = 4 << 30
"""Most bytes of an adapter's weights. Adapter rank 512 on every projection of a model with 8 billion parameters takes
about 3 GiB."""

DTYPES: Final[Mapping[str, npt.DTypeLike]] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""Dtypes of tensors that are read, each with numpy's type for its bytes."""

Floats = npt.NDArray[np.float32]
MOST_ERROR_CHARACTERS: Final = 300

_TENSOR = re.compile(r"base_model\.model\.(?:model\.)?layers\.(\d{1,5})\.(self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")
_OF_ATTENTION: Final = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})

_IGNORED: Final = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights",
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
    "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "peft_version",
    "runtime_config", "loftq_config", "eva_config", "qalora_group_size", "megatron_core", "lora_ga_config",
})  # fmt: skip
"""Keys that are read below, or that change nothing in what is computed. The names of tensors say which modules have an
adapter."""

_PLAIN_STARTS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model's weights as they are."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    dtype: str
    """A key of DTYPES."""
    shape: tuple[int, ...]
    raw: bytearray
    """The tensor's bytes in the file."""

    def floats(self) -> Floats:
        """Returns its numbers as float32 of its shape."""
        numbers = np.frombuffer(self.raw, DTYPES[self.dtype]).reshape(self.shape)
        if self.dtype == "BF16":
            return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return numbers.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What is added to one projection: y += (x A^T) B^T * scale."""

    a: Floats
    """[lora_rank, inputs]"""
    b: Floats
    """[outputs, lora_rank]"""


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA adapter. Adapters with the same digest compute the same."""

    digest: bytes
    """A digest of DIGEST_BYTES over the tensors, their names and the scale."""
    lora_rank: int
    scale: float
    parts: Mapping[tuple[int, str], LowRank]
    """What is added, by layer and projection (a name of PROJECTIONS)."""

    @property
    def parameters(self) -> int:
        return sum(part.a.size + part.b.size for part in self.parts.values())

    def check_fits(self, shapes: ProjectionShapes) -> None:
        """Checks that the model has every adapted projection in the same size. Raises ConfigError naming the first that
        it does not have."""
        for (layer, name), part in sorted(self.parts.items()):
            if layer >= shapes.layers:
                raise _refused(f"layer {layer} is adapted, and the model has {shapes.layers} layers")
            found, wanted = (part.a.shape[1], part.b.shape[0]), shapes.sizes[name]
            if found != wanted:
                raise _refused(
                    f"layers.{layer}.{name} is adapted from {found[0]} to {found[1]} channels; the model's goes from "
                    f"{wanted[0]} to {wanted[1]}"
                )


def read_adapter(folder: Path, *, most_lora_rank: int = MOST_LORA_RANK) -> Adapter:
    """Returns the adapter in a folder. Raises ConfigError, in one line, for one that is broken or is not computed."""
    config = _config(folder)
    lora_rank, scale = _lora_rank(config, most_lora_rank), _scale(config)
    _refuse_unknown(config)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        if (folder / PICKLED_FILE).exists():
            raise _refused(f"{PICKLED_FILE} is a pickle, which is never read; save the adapter as {WEIGHTS_FILE}")
        raise _refused(f"{folder} has no {WEIGHTS_FILE}")
    if weights.stat().st_size > MOST_WEIGHT_BYTES:
        raise _refused(f"{WEIGHTS_FILE} has {weights.stat().st_size} bytes; at most {MOST_WEIGHT_BYTES} are read")
    tensors = _tensors(weights)
    return Adapter(_digest(tensors, scale), lora_rank, scale, _parts(tensors, lora_rank))


def _refused(why: str) -> ConfigError:
    return ConfigError(f"adapter refused: {why}", field="adapter")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        if not path.is_file():
            raise _refused(f"{folder} has no {CONFIG_FILE}")
        if path.stat().st_size > MOST_CONFIG_BYTES:
            raise _refused(f"{CONFIG_FILE} has {path.stat().st_size} bytes; at most {MOST_CONFIG_BYTES} are read")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise _refused(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _refused(f"{CONFIG_FILE} is not JSON") from error
    if not isinstance(config, dict):
        raise _refused(f"{CONFIG_FILE} is no JSON object")
    return config


def _lora_rank(config: Mapping[str, Any], most_lora_rank: int) -> int:
    if config.get("peft_type") != "LORA":
        raise _refused(f"peft_type is {_shown(config.get('peft_type'))}; LORA is served")
    lora_rank = config.get("r")
    if type(lora_rank) is not int or not 1 <= lora_rank <= most_lora_rank:
        raise _refused(f"r (the adapter rank) is {_shown(lora_rank)}; from 1 to {most_lora_rank} is served")
    return lora_rank


def _scale(config: Mapping[str, Any]) -> float:
    alpha, lora_rank = config.get("lora_alpha"), config["r"]
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= 1e6:
        raise _refused(f"lora_alpha is {_shown(alpha)}; it must be a finite number")
    is_rooted = config.get("use_rslora", False)
    if not isinstance(is_rooted, bool | None):
        raise _refused(f"use_rslora is {_shown(is_rooted)}; it must be true or false")
    return float(alpha / (math.sqrt(lora_rank) if is_rooted else lora_rank))


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    if config.get("bias", "none") != "none":
        raise _refused(f"bias is {_shown(config['bias'])}; none is served")
    start = config.get("init_lora_weights")
    if start not in _PLAIN_STARTS or (isinstance(start, int | float) and not isinstance(start, bool)):
        raise _refused(f"init_lora_weights is {_shown(start)}, which changes the base model's weights")
    for key, value in config.items():
        if key not in _IGNORED and value:
            raise _refused(f"{str(key)[:60]} is {_shown(value)}, which is not computed")


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a file by name. The library checks the file. Its bytes are read once."""
    from safetensors import SafetensorError, deserialize  # programs that read no file, as `make gpu`, do without it

    try:
        found = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]  # its stub has no types
    except OSError as error:
        raise _refused(f"{path} cannot be read: {error.strerror}") from error
    except SafetensorError as error:
        raise _refused(f"{path} is broken: {' '.join(str(error).split())[:MOST_ERROR_CHARACTERS]}") from error
    for name, facts in found:
        if facts["dtype"] not in DTYPES:
            raise _refused(f"tensor {name[:120]!r} has dtype {facts['dtype']}; {', '.join(DTYPES)} are read")
    return {name: StoredTensor(facts["dtype"], tuple(facts["shape"]), facts["data"]) for name, facts in found}


def _parts(tensors: Mapping[str, StoredTensor], lora_rank: int) -> dict[tuple[int, str], LowRank]:
    found: dict[tuple[int, str], dict[str, Floats]] = {}
    for name, tensor in tensors.items():
        matched = _TENSOR.fullmatch(name)
        if matched is None or not _is_computed(matched[2], matched[3]):
            raise _refused(f"tensor {name[:120]!r} is not computed")
        key, side = (int(matched[1]), matched[3]), matched[4]
        found.setdefault(key, {})[side] = _checked(name, side, tensor, lora_rank)
    if not found:
        raise _refused(f"{WEIGHTS_FILE} has no tensors")
    parts: dict[tuple[int, str], LowRank] = {}
    for (layer, module), pair in found.items():
        if len(pair) != 2:
            raise _refused(f"layers.{layer}.{module} has lora_{next(iter(pair))} alone")
        for part_name, part in _split(layer, module, LowRank(pair["A"], pair["B"])):
            if (layer, part_name) in parts:
                raise _refused(f"layers.{layer}.{part_name} is adapted twice")
            parts[layer, part_name] = part
    return parts


def _is_computed(place: str, module: str) -> bool:
    is_known = module in PROJECTIONS or module in FUSED
    return is_known and (module in _OF_ATTENTION) == (place == "self_attn")


def _checked(name: str, side: str, tensor: StoredTensor, lora_rank: int) -> Floats:
    is_of_lora_rank = len(tensor.shape) == 2 and 0 not in tensor.shape and tensor.shape[side == "B"] == lora_rank
    if not is_of_lora_rank:
        raise _refused(f"tensor {name[:120]!r} has shape {list(tensor.shape)}, and r is {lora_rank}")
    numbers = tensor.floats()
    if not np.isfinite(numbers).all():
        raise _refused(f"tensor {name[:120]!r} has numbers that are not finite")
    return numbers


def _split(layer: int, module: str, part: LowRank) -> list[tuple[str, LowRank]]:
    """Returns the projections of a module, which may fuse several: two of equal size, or queries with keys and values.

    In every model with fused queries, keys and values, queries are as wide as the hidden state. So the number of inputs
    is that of the queries' outputs, and keys and values share the rest.
    """
    names = FUSED.get(module)
    if names is None:
        return [(module, part)]
    outputs, inputs = part.b.shape[0], part.a.shape[1]
    rest = outputs - inputs
    sizes = [outputs // 2] * 2 if len(names) == 2 else [inputs, rest // 2, rest // 2]
    if sum(sizes) != outputs or min(sizes) <= 0:
        raise _refused(f"layers.{layer}.{module} has {outputs} outputs, which are no {' and '.join(names)}")
    stacked = np.split(part.b, np.cumsum(sizes)[:-1])
    return [(name, LowRank(part.a, rows)) for name, rows in zip(names, stacked, strict=True)]


def _digest(tensors: Mapping[str, StoredTensor], scale: float) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"twostroke.lora")
    digest.update(scale.hex().encode())
    for name, tensor in sorted(tensors.items()):
        for part in (name.encode("utf-8", "surrogatepass"), f"{tensor.dtype} {tensor.shape}".encode(), tensor.raw):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.digest()


def _shown(value: Any) -> str:
    return repr(value)[:60]
