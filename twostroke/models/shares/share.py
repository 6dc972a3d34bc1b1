"""The share that one rank of a worker has of a model: ranges of heads, MLP columns, experts and the vocabulary.

A rank loads an ordinary model with fewer of them. Its outputs of attention and MLP are parts of a sum over all ranks:
the column- and row-parallel products of Megatron-LM (arXiv 1909.08053). No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu.weights.packing import GROUP, is_quantised
from twostroke.kernels.layout import Layout
from twostroke.models.spec import ModelSpec, Share
from twostroke.models.weights.stored.model_files import LayoutOf

BY_COLUMNS: Final = ("o_proj", "down_proj")
"""Matrix products whose inputs are divided among the ranks. Their results are parts of a sum. Their biases are the
first rank's."""

_ROWS_OF_HEADS: Final = ("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.sinks")
_ROWS_OF_KV_HEADS: Final = ("self_attn.k_proj", "self_attn.v_proj")
_MLPS: Final = ("mlp", "mlp.shared_expert")


def share_of(spec: ModelSpec, rank: int, ranks: int, flag: str = "--tp", *, mlp_unit: int = 1) -> ModelSpec:
    """Returns the share of one rank; the model itself where there is only one rank.

    `mlp_unit` comes from `mlp_unit_of`. Raises ConfigError, naming `flag`, for models that cannot be divided so.
    """
    if ranks == 1:
        return spec
    _check(spec, ranks, flag, mlp_unit)
    experts, share = spec.experts, Share(rank, ranks, spec, mlp_unit)
    return replace(
        spec,
        heads=spec.heads // ranks,
        kv_heads=max(1, spec.kv_heads // ranks),
        intermediate_size=len(share.columns(spec.intermediate_size)),
        experts=None if experts is None else replace(experts, shared_width=len(share.columns(experts.shared_width))),
        share=share,
    )


def check_shared_out(flag: str, ranks: int, *, has_codes: bool) -> None:
    """Raises ConfigError where the weights cannot be divided among ranks on GPUs. `flag` sets the number of ranks."""
    if ranks > 1 and has_codes:
        raise ConfigError(
            f"{flag} {ranks}: quantised weights are shared out over ranks on CPUs only: give --device cpu, or "
            "take plain ones",
            field=flag,
        )


def mlp_unit_of(spec: ModelSpec, layout_of: LayoutOf | None, *, is_int8: bool) -> int:
    """Returns how many neighbouring columns of an MLP stay on one rank. Where weights are rounded in groups, whole
    groups do.

    `layout_of` has matrices by the names that the program has for them. It is None where all are plain numbers.
    """
    if layout_of is None:
        widths = _mlp_widths(spec).values()
        return GROUP if widths and all(is_quantised(width, is_int8=is_int8) for width in widths) else 1
    downs = [(name, inputs) for name, inputs in cut_by_columns(spec) if name.endswith("down_proj.weight")]
    found = [(layout_of(name), inputs) for name, inputs in downs]
    return max((each.whole_inputs for each, inputs in found if each is not None and each.can_pack(inputs)), default=1)


def cut_by_columns(spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Yields (name, inputs) of the matrices of a whole model that are divided among ranks by inputs."""
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.o_proj.weight", spec.attended_width
        if spec.experts_of(layer) is None:
            yield f"{prefix}.mlp.down_proj.weight", spec.intermediate_size
        elif _shared_width(spec):
            yield f"{prefix}.mlp.shared_expert.down_proj.weight", _shared_width(spec)


def shares_of(
    spec: ModelSpec, ranks: int, layout_of: LayoutOf | None, *, is_int8: bool, flag: str = "--tp"
) -> tuple[ModelSpec, ...]:
    """Returns the share of each rank; the model itself where there is one rank.

    `layout_of` is as in `mlp_unit_of`. Raises ConfigError where the model or its quantised matrices cannot be divided
    so.
    """
    if ranks == 1:
        return (spec,)
    unit = mlp_unit_of(spec, layout_of, is_int8=is_int8)
    shares = tuple(share_of(spec, rank, ranks, flag, mlp_unit=unit) for rank in range(ranks))
    for share in shares:
        if layout_of is not None:
            own = layouts_of_share(layout_of, share)
            for name, _ in cut_by_columns(spec):
                own(name)  # raises where a share would end inside a group of inputs
    return shares


@dataclass(frozen=True, slots=True)
class Cut:
    """How ranks share out the rows or columns of one tensor."""

    parts: int
    """Number of equal parts of the whole tensor."""
    own: range
    """Indices of the parts that this rank has."""
    by_columns: bool

    def whole(self, own: int) -> int:
        """Returns how many rows or columns the whole tensor has, given the rank's number."""
        return own // len(self.own) * self.parts

    def of(self, whole: int) -> range:
        """Returns the indices of the rank's rows or columns, given the whole tensor's number."""
        unit = whole // self.parts
        return range(self.own.start * unit, self.own.stop * unit)


def cut_of(share: Share, name: str) -> Cut | None:
    """Returns how a tensor is shared out; None where every rank has all of it."""
    _, is_layer, rest = name.partition("model.layers.")
    tensor = rest.partition(".")[2]
    module = tensor.rpartition(".")[0]
    if not is_layer:
        return None
    by_columns, whole = module.endswith(BY_COLUMNS), share.whole
    if tensor in _ROWS_OF_HEADS or module in _ROWS_OF_HEADS or module == "self_attn.o_proj":
        return Cut(whole.heads, share.of(whole.heads), by_columns)
    if module in _ROWS_OF_KV_HEADS:
        return Cut(whole.kv_heads, share.of(whole.kv_heads), by_columns)
    mlp, _, product = module.rpartition(".")
    if mlp not in _MLPS or not product.endswith("_proj"):
        return None
    width = whole.intermediate_size if mlp == "mlp" else _shared_width(whole)
    parts = width // share.mlp_unit
    return Cut(parts, share.of(parts), by_columns)


def cut_layout(layout: Layout, inputs: int, cut: Cut, share: Share, name: str) -> Layout:
    """Returns the layout of a rank's part of a matrix with this many inputs.

    Raises ConfigError where the part ends inside a group of inputs that the layout keeps together.
    """
    if not cut.by_columns:
        return layout
    own = cut.of(inputs)
    found = layout.of_inputs(own, inputs)
    if found is None:
        raise ConfigError(
            f"--tp {share.count}: the codes of {name.removesuffix('.weight')} belong together by {layout.whole_inputs} "
            f"inputs, and rank {share.index} would have those from {own.start} to {own.stop - 1} of {inputs}",
            field="--tp",
        )
    return found


def layouts_of_share(layout_of: LayoutOf, spec: ModelSpec) -> LayoutOf:
    """Returns the layouts of the matrices that a rank has, by the names that the program has for them."""
    share = spec.share
    if share is None:
        return layout_of
    whole_inputs = dict(cut_by_columns(share.whole))

    def layout(name: str) -> Layout | None:
        whole, cut, inputs = layout_of(name), cut_of(share, name), whole_inputs.get(name)
        if whole is None or cut is None or inputs is None or not whole.can_pack(inputs):
            return whole
        return cut_layout(whole, inputs, cut, share, name)

    return layout


def _shared_width(spec: ModelSpec) -> int:
    return 0 if spec.experts is None else spec.experts.shared_width


def _mlp_widths(spec: ModelSpec) -> dict[str, int]:
    """Returns the widths of MLPs with columns divided among ranks, by their names."""
    dense = {} if spec.expert_layers == spec.layers else {"columns of its MLPs": spec.intermediate_size}
    return dense | ({"columns of its shared expert": _shared_width(spec)} if _shared_width(spec) else {})


def _check(spec: ModelSpec, ranks: int, flag: str, mlp_unit: int) -> None:
    if spec.generic is not None:
        raise ConfigError(
            f"{flag} {ranks}: {spec.architecture} is computed by transformers, which we cannot share out over ranks",
            field=flag,
        )
    if spec.heads % ranks:
        raise ConfigError(f"{flag} {ranks} does not divide the model's {spec.heads} attention heads", field=flag)
    for what, width in _mlp_widths(spec).items():
        if mlp_unit == 1 and width % ranks:
            raise ConfigError(f"{flag} {ranks} does not divide the model's {width} {what}", field=flag)
        if width % mlp_unit or width < mlp_unit * ranks:
            raise ConfigError(
                f"{flag} {ranks}: the model's {width} {what} cannot be shared out by {mlp_unit} that belong together",
                field=flag,
            )
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        raise ConfigError(
            f"{flag} {ranks} neither divides the model's {spec.kv_heads} key-value heads nor is a multiple of them",
            field=flag,
        )
    if spec.experts is not None and spec.experts.count < ranks:
        raise ConfigError(f"{flag} {ranks}: the model has only {spec.experts.count} experts", field=flag)
