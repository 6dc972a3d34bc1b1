"""The options of quantised weights in config.json, as values. Options that are not known are refused by key. No torch
here.

`SCHEMES` is the table of methods: one line each. A module that the config ignores stays exact.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from twostroke.base.errors import ConfigError, UnsupportedModel

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the matrices of one model are quantised."""

    method: str
    """A key of `coded_matrices.MAIN`, which determines the tensors that store a matrix."""
    bits: int = 8
    group: int | None = None
    """Number of inputs that share a scale; None for all inputs of a row."""
    is_symmetric: bool = True
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block of FP8 that has one scale."""
    zero_bias: int = 0
    """Number that is added to the zeros in the file."""
    ignored: tuple[str, ...] = ()
    """Modules that stay exact: names, their prefixes or suffixes, where * stands for anything, or regular expressions
    after "re:"."""

    def ignores(self, module: str) -> bool:
        return any(_matches(pattern, module) for pattern in self.ignored)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatch.fnmatchcase(f".{module}.", f"*.{pattern}.*")


def scheme_of(options: Options, where: str) -> Scheme:
    """Returns the scheme of a `quantization_config`. Raises ConfigError naming a method, key or value that is not
    served."""
    method = options.get("quant_method")
    if method not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise UnsupportedModel(f"{where}: quantised weights ({method}) are not served; served: {known}", field="model")
    return SCHEMES[method](_Reader(options, f"{where}: quantization_config"))


class _Reader:
    """Takes options out of a config one by one. Those that are left at the end are unknown."""

    def __init__(self, options: Any, where: str) -> None:
        if not isinstance(options, Mapping):
            raise ConfigError(f"{where} is not an object", field="model")
        self._left = dict(options)
        self._where = where

    def take(self, key: str, default: Any = None) -> Any:
        return self._left.pop(key, default)

    def one_of(self, key: str, *values: Any, default: Any = None) -> Any:
        """Takes an option that must have one of these values. Raises ConfigError for another value."""
        value = self.take(key, default)
        if not any(value == each and type(value) is type(each) for each in values):
            raise self.refused(key, value)
        return value

    def whole(self, key: str, least: int, most: int) -> int:
        value = self.take(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refused(key, value)
        return value

    def names(self, key: str) -> tuple[str, ...]:
        value = self.take(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.refused(key, value)
        for name in value:
            try:
                re.compile(name.removeprefix("re:"))
            except re.error as error:
                raise self.refused(key, name) from error
        return tuple(value)

    def inner(self, key: str) -> _Reader:
        return _Reader(self.take(key), f"{self._where}.{key}")

    def passed(self, *keys: str) -> None:
        """Drops options that have no influence here."""
        for key in keys:
            self.take(key)

    def finish(self) -> None:
        """Raises ConfigError naming an option that is left and not empty or false."""
        for key, value in self._left.items():
            if value not in (None, False, [], {}):
                raise self.refused(key, value)

    def refused(self, key: str, value: Any) -> ConfigError:
        return UnsupportedModel(f"{self._where}.{key} = {value!r} is not served", field="model")


def _group(options: _Reader, key: str = "group_size") -> int | None:
    """Returns the number of inputs in a group; None for -1, which means that a row has one scale."""
    size = options.whole(key, -1, 1 << 20)
    if size != -1 and (size < 32 or size % 32):
        raise options.refused(key, size)
    return None if size == -1 else size


def _gptq(options: _Reader) -> Scheme:
    bits = options.one_of("bits", 4, 8)
    version = options.one_of("checkpoint_format", "gptq", "gptq_v2", default="gptq")
    options.one_of("pack_dtype", "int32", None)
    scheme = Scheme(
        method="gptq",
        bits=bits,
        group=_group(options),
        is_symmetric=options.one_of("sym", True, False, default=True),
        zero_bias=1 if version == "gptq" else 0,
        ignored=options.names("modules_to_not_convert"),
    )
    options.passed(
        "quant_method", "desc_act", "damp_percent", "damp_auto_increment", "true_sequential", "static_groups"
    )
    options.passed("model_name_or_path", "model_file_base_name", "meta", "quantizer", "lm_head", "is_marlin_format")
    options.passed("dataset", "tokenizer", "batch_size", "use_exllama", "exllama_config", "max_input_length", "version")
    options.passed("use_cuda_fp16", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block")
    options.passed("pad_token_id", "disable_exllama", "cache_block_outputs", "modules_in_block_to_quantize", "backend")
    options.finish()
    return scheme


def _awq(options: _Reader) -> Scheme:
    options.one_of("bits", 4)
    options.one_of("version", "gemm", "GEMM", default="gemm")
    options.one_of("zero_point", True, default=True)
    scheme = Scheme(
        method="awq",
        bits=4,
        group=_group(options),
        is_symmetric=False,
        ignored=options.names("modules_to_not_convert"),
    )
    options.passed("quant_method", "backend", "exllama_config", "fuse_max_seq_len")
    options.finish()
    return scheme


def _fp8(options: _Reader) -> Scheme:
    options.one_of("activation_scheme", "dynamic", "static", default="dynamic")
    options.one_of("fmt", "e4m3", None)
    block = options.take("weight_block_size")
    scheme = Scheme(
        method="fp8",
        block=None if block is None else _block(options, "weight_block_size", block),
        ignored=(*options.names("modules_to_not_convert"), *options.names("ignored_layers")),
    )
    options.passed("quant_method")
    options.finish()
    return scheme


def _block(options: _Reader, key: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int for size in value):
        raise options.refused(key, value)
    rows, inputs = value
    if rows < 1 or inputs < 32 or inputs % 32:
        raise options.refused(key, value)
    return rows, inputs


def _compressed(options: _Reader) -> Scheme:
    """Returns the scheme of a config with one group of modules and one kind of weights."""
    options.passed("quant_method", "quantization_status", "global_compression_ratio", "version")
    groups = options.take("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise options.refused("config_groups", groups if groups is None else sorted(groups))
    name, content = next(iter(groups.items()))
    group = _Reader(content, f"quantization_config.config_groups.{name}")
    group.one_of("targets", ["Linear"])
    weights = group.inner("weights")
    form, number = options.take("format"), weights.one_of("type", "int", "float")
    kind = _COMPRESSED.get((form, number))
    if kind is None:
        raise options.refused("format", form)
    scheme = kind(weights, options.names("ignore"))
    weights.one_of("dynamic", False, None)
    weights.passed("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
    weights.finish()
    group.passed("input_activations", "format")  # activations are rounded at least as finely here
    group.finish()
    options.finish()
    return scheme


def _mxfp4(options: _Reader) -> Scheme:
    """Returns the scheme of gpt-oss, in which only experts are quantised."""
    options.passed("quant_method", "use_kernels")
    ignored = options.names("modules_to_not_convert")
    options.one_of("dequantize", False, None)
    options.finish()
    return Scheme(method="expert blocks", bits=4, group=32, ignored=ignored)


def _group_of(weights: _Reader, strategy: str) -> int | None:
    if strategy == "group":
        return _group(weights)
    weights.passed("group_size")
    return None


def _packed_int(weights: _Reader, ignored: tuple[str, ...]) -> Scheme:
    bits = weights.one_of("num_bits", 4, 8)
    strategy = weights.one_of("strategy", "group", "channel")
    group = _group_of(weights, strategy)
    symmetric = weights.one_of("symmetric", True, False, default=True)
    return Scheme(method="packed int", bits=bits, group=group, is_symmetric=symmetric, ignored=ignored)


def _plain_int(weights: _Reader, ignored: tuple[str, ...]) -> Scheme:
    weights.one_of("num_bits", 8)
    strategy = weights.one_of("strategy", "group", "channel", "tensor")
    group = _group_of(weights, strategy)
    symmetric = weights.one_of("symmetric", True, False, default=True)
    return Scheme(method="int8", group=group, is_symmetric=symmetric, ignored=ignored)


def _plain_float(weights: _Reader, ignored: tuple[str, ...]) -> Scheme:
    weights.one_of("num_bits", 8)
    strategy = weights.one_of("strategy", "channel", "tensor", "block")
    weights.one_of("symmetric", True, default=True)
    weights.passed("group_size")
    structure = weights.take("block_structure")
    block = _block(weights, "block_structure", structure) if strategy == "block" else None
    return Scheme(method="fp8", block=block, ignored=ignored)


def _packed_fp4(weights: _Reader, ignored: tuple[str, ...]) -> Scheme:
    weights.one_of("num_bits", 4)
    weights.one_of("strategy", "group")
    weights.one_of("group_size", 32)
    weights.one_of("symmetric", True, default=True)
    return Scheme(method="mxfp4", bits=4, group=32, ignored=ignored)


_COMPRESSED: Final[dict[tuple[Any, Any], Callable[[_Reader, tuple[str, ...]], Scheme]]] = {
    ("pack-quantized", "int"): _packed_int,
    ("int-quantized", "int"): _plain_int,
    ("naive-quantized", "int"): _plain_int,
    ("float-quantized", "float"): _plain_float,
    ("naive-quantized", "float"): _plain_float,
    ("mxfp4-pack-quantized", "float"): _packed_fp4,
}
"""The formats of compressed-tensors, each with the type of its weights."""

SCHEMES: Final[dict[Any, Callable[[_Reader], Scheme]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
}
"""The methods that are served, by `quant_method`."""
