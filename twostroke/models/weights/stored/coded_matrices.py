"""Finds the tensors of safetensors files that hold one quantised matrix, and its layout. No torch here.

`KINDS` is the table: for each method of `schemes`, the function that finds the parts of a matrix and checks that they
fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from twostroke.base.errors import ConfigError, UnsupportedModel
from twostroke.kernels.layout import Layout
from twostroke.models.weights.fused_experts import FusedExpert
from twostroke.models.weights.stored.schemes import Scheme, scheme_of
from twostroke.models.weights.stored.tensor_header import HeaderTensor, quantization_in, read_headers

SCALES: Final = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""Types of scales in a layout, by the dtype of their tensor."""
CODES: Final = frozenset({"I32", "I8", "U8", "F8_E4M3"})
"""Dtypes that hold codes, not plain numbers, in a matrix."""


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix [rows, inputs] and the tensors that hold it."""

    rows: int
    inputs: int
    layout: Layout
    parts: Mapping[str, HeaderTensor]
    """Tensors by the last part of their names: "qweight", "weight_scale" and so on."""
    fused: FusedExpert | None = None
    """The matrix's place in the tensors, where these hold all experts of a layer."""


@dataclass(frozen=True, slots=True)
class CodedMatrices:
    """The quantised matrices of one directory."""

    directory: Path
    scheme: Scheme
    tensors: Mapping[str, HeaderTensor]
    _found: dict[str, CodedMatrix | None] = field(default_factory=dict)

    def find(self, name: str) -> CodedMatrix | None:
        """Returns the matrix that the model calls `name`; None where it is stored as plain numbers, or not at all.

        Raises ConfigError where its parts do not fit together, or where it is quantised although the config says that
        it is not.
        """
        if name not in self._found:
            self._found[name] = self._read(name)
        return self._found[name]

    def modules(self) -> list[str]:
        """Returns the names of all quantised matrices. Where experts share a tensor, that is only its first matrix."""
        main = MAIN[self.scheme.method]
        if self.scheme.method == EXPERT_BLOCKS:
            return _first_experts(self.tensors)
        found = [name.removesuffix(f".{main}") for name in self.tensors if name.endswith(f".{main}")]
        return [f"{module}.weight" for module in found if self.tensors[f"{module}.{main}"].dtype in CODES]

    def _read(self, name: str) -> CodedMatrix | None:
        module, main = name.removesuffix(".weight"), MAIN[self.scheme.method]
        if self.scheme.method == EXPERT_BLOCKS:
            return _expert_blocks(name, self.tensors)
        tensor = self.tensors.get(f"{module}.{main}")
        if tensor is None or tensor.dtype not in CODES:
            return None
        if self.scheme.ignores(module):
            raise ConfigError(
                f"{self.directory}: {module} is quantised, but quantization_config says that it is not", field="model"
            )
        parts = {part: self.tensors[f"{module}.{part}"] for part in PARTS if f"{module}.{part}" in self.tensors}
        return KINDS[self.scheme.method](_Parts(module, parts), self.scheme)


def coded_in(directory: Path) -> CodedMatrices | None:
    """Returns the quantised matrices of a directory's safetensors; None where its config names none.

    Raises ConfigError for files that are damaged and options that are not served.
    """
    options = quantization_in(directory)
    if options is None or not any(directory.glob("*.safetensors")):
        return None
    tensors = read_headers(directory)
    for name, tensor in tensors.items():
        if name.endswith(FUSED_EXPERTS) and tensor.dtype in CODES:
            raise UnsupportedModel(
                f"{directory}: tensor {name} has the codes of all experts of a layer, which are served only where each "
                "expert has tensors of its own",
                field="model",
            )
    return CodedMatrices(directory, scheme_of(options, str(directory / "config.json")), tensors)


FUSED_EXPERTS: Final = tuple(
    f".experts.{part}{kind}"
    for part in ("gate_up_proj", "down_proj")
    for kind in ("", ".weight", "_packed", ".qweight")
)
"""Endings of the names of tensors that hold all experts of a layer. They are only served as plain numbers."""


PARTS: Final = (
    *("qweight", "qzeros", "scales", "g_idx"),
    *("weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx"),
)
EXPERT_BLOCKS: Final = "expert blocks"
"""The method of gpt-oss: tensors of all experts of a layer. `fused_experts` knows their names."""
MAIN: Final = {
    EXPERT_BLOCKS: "blocks",
    "gptq": "qweight",
    "awq": "qweight",
    "fp8": "weight",
    "int8": "weight",
    "packed int": "weight_packed",
    "mxfp4": "weight_packed",
}
"""The last part of the name of the tensor with the codes, by method."""


@dataclass(frozen=True, slots=True)
class _Parts:
    module: str
    found: Mapping[str, HeaderTensor]

    def take(self, part: str, dtypes: tuple[str, ...], dimensions: int = 2) -> HeaderTensor:
        tensor = self.found.get(part)
        if tensor is None:
            raise self.wrong(f"has no {part}")
        if tensor.dtype not in dtypes or len(tensor.shape) != dimensions or 0 in tensor.shape:
            raise self.wrong(f"has {part} of type {tensor.dtype} and shape {tensor.shape}")
        return tensor

    def check(self, part: str, shape: tuple[int, ...], *others: tuple[int, ...]) -> None:
        found = self.found[part].shape
        if found not in (shape, *others):
            raise self.wrong(f"has {part} of shape {found}, its codes ask for {shape}")

    def wrong(self, what: str) -> ConfigError:
        return ConfigError(f"weights of {self.module} cannot be read: the module {what}", field="model")

    def groups(self, inputs: int, group: int | None) -> tuple[int, int]:
        """Returns how many inputs share a scale, and how many scales a row has."""
        size = group or inputs
        if inputs % size or inputs % 32:
            raise self.wrong(f"has {inputs} inputs, which are not groups of {size}")
        return size, inputs // size


def _gptq(parts: _Parts, scheme: Scheme) -> CodedMatrix:
    codes, per_word = parts.take("qweight", ("I32",)), 32 // scheme.bits
    inputs, rows = codes.shape[0] * per_word, codes.shape[1]
    size, groups = parts.groups(inputs, scheme.group)
    scales = parts.take("scales", tuple(SCALES))
    parts.check("scales", (groups, rows))
    parts.take("qzeros", ("I32",))
    parts.check("qzeros", (groups, -(-rows // per_word)))
    if "g_idx" in parts.found:
        parts.take("g_idx", ("I32",), 1)
        parts.check("g_idx", (inputs,))
    layout = _int_layout(scheme, size, scales.dtype)
    return CodedMatrix(rows, inputs, layout, parts.found)


def _awq(parts: _Parts, scheme: Scheme) -> CodedMatrix:
    codes = parts.take("qweight", ("I32",))
    inputs, rows = codes.shape[0], codes.shape[1] * 8
    size, groups = parts.groups(inputs, scheme.group)
    scales = parts.take("scales", tuple(SCALES))
    parts.check("scales", (groups, rows))
    parts.take("qzeros", ("I32",))
    parts.check("qzeros", (groups, rows // 8))
    return CodedMatrix(rows, inputs, _int_layout(scheme, size, scales.dtype), parts.found)


def _packed_int(parts: _Parts, scheme: Scheme) -> CodedMatrix:
    codes, per_word = parts.take("weight_packed", ("I32",)), 32 // scheme.bits
    rows, inputs = codes.shape[0], codes.shape[1] * per_word
    size, groups = parts.groups(inputs, scheme.group)
    scales = parts.take("weight_scale", tuple(SCALES))
    parts.check("weight_scale", (rows, groups))
    if not scheme.is_symmetric:
        parts.take("weight_zero_point", ("I32",))
        parts.check("weight_zero_point", (-(-rows // per_word), groups))
    if "weight_g_idx" in parts.found:
        parts.take("weight_g_idx", ("I32",), 1)
        parts.check("weight_g_idx", (inputs,))
    return CodedMatrix(rows, inputs, _int_layout(scheme, size, scales.dtype), parts.found)


def _int8(parts: _Parts, scheme: Scheme) -> CodedMatrix:
    rows, inputs = parts.take("weight", ("I8",)).shape
    size, groups = parts.groups(inputs, scheme.group)
    scales = _scales(parts, "weight_scale")
    parts.check("weight_scale", (rows, groups), (1,), (1, 1), (), (rows,))
    if not scheme.is_symmetric:
        if "weight_zero_point" not in parts.found:
            raise parts.wrong("has no weight_zero_point")
        parts.check("weight_zero_point", scales.shape)
        if parts.found["weight_zero_point"].dtype != "I8":
            raise parts.wrong("has weight_zero_point of another type than I8")
    return CodedMatrix(rows, inputs, _int_layout(scheme, size, scales.dtype), parts.found)


def _fp8(parts: _Parts, scheme: Scheme) -> CodedMatrix:
    rows, inputs = parts.take("weight", ("F8_E4M3",)).shape
    name = "weight_scale_inv" if "weight_scale_inv" in parts.found else "weight_scale"
    scales = _scales(parts, name)
    group = inputs
    if scheme.block is not None:
        group = scheme.block[1]
        parts.check(name, (-(-rows // scheme.block[0]), -(-inputs // group)))
    else:
        parts.check(name, (rows, 1), (rows,), (1,), (1, 1), ())
    if inputs % 32:
        raise parts.wrong(f"has {inputs} inputs, which are not a multiple of 32")
    return CodedMatrix(rows, inputs, Layout(bits=8, group=group, scales=SCALES[scales.dtype], is_fp8=True), parts.found)


def _mxfp4(parts: _Parts, _scheme: Scheme) -> CodedMatrix:
    codes = parts.take("weight_packed", ("U8",))
    rows, inputs = codes.shape[0], codes.shape[1] * 2
    parts.groups(inputs, 32)
    parts.take("weight_scale", ("U8", "F8_E8M0"))
    parts.check("weight_scale", (rows, inputs // 32))
    return CodedMatrix(rows, inputs, Layout(bits=4, group=32, scales="exponent", is_fp4=True), parts.found)


def _expert_blocks(name: str, tensors: Mapping[str, HeaderTensor]) -> CodedMatrix | None:
    fused = FusedExpert.of(name, tensors)
    if fused is None or fused.expert is None or f"{fused.name}_blocks" not in tensors:
        return None
    found = {part: f"{fused.name}_{part}" for part in ("blocks", "scales")}
    parts = _Parts(fused.name, {part: tensors[of] for part, of in found.items() if of in tensors})
    codes = parts.take("blocks", ("U8",), 4)
    experts, outputs, groups, width = codes.shape
    parts.take("scales", ("U8", "F8_E8M0"), 3)
    parts.check("scales", codes.shape[:3])
    if width != 16 or (fused.half is not None and outputs % 2):
        raise parts.wrong(f"has blocks of shape {codes.shape}")
    if fused.expert >= experts:
        raise parts.wrong(f"has no expert {fused.expert}")
    rows = outputs if fused.half is None else outputs // 2
    layout = Layout(bits=4, group=32, scales="exponent", is_fp4=True)
    return CodedMatrix(rows, groups * 32, layout, parts.found, fused)


def _first_experts(tensors: Mapping[str, HeaderTensor]) -> list[str]:
    found = [name.removesuffix("_blocks").rpartition(".") for name in tensors if name.endswith("_blocks")]
    return [f"{block}.0.{'gate_proj' if part == 'gate_up_proj' else part}.weight" for block, _, part in found]


def _scales(parts: _Parts, name: str) -> HeaderTensor:
    found = parts.found.get(name)
    if found is None:
        raise parts.wrong(f"has no {name}")
    if found.dtype not in SCALES:
        raise parts.wrong(f"has {name} of type {found.dtype}")
    return found


def _int_layout(scheme: Scheme, size: int, dtype: str) -> Layout:
    """Returns the layout of integer codes. Those of 8 bits are signed: 128 is subtracted from a file's unsigned
    codes."""
    offset = 8 if scheme.bits == 4 and scheme.is_symmetric else 0
    zeros = "none" if scheme.is_symmetric else "zero" if scheme.bits == 4 else "signed zero"
    return Layout(bits=scheme.bits, group=size, scales=SCALES[dtype], mins=zeros, offset=offset)


KINDS: Final[dict[str, Callable[[_Parts, Scheme], CodedMatrix]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "int8": _int8,
    "packed int": _packed_int,
    "mxfp4": _mxfp4,
}
"""The function that finds a matrix, by method."""
