"""The share that one rank of a worker has of a model: ranges of heads, MLP columns, experts and the vocabulary.

A rank loads an ordinary model with fewer of them. What its products of attention and MLP give is a part of a sum over
all ranks: the column- and row-parallel products of Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

from dataclasses import replace

from twostroke.errors import ConfigError
from twostroke.models.spec import ModelSpec, Share


def share_of(spec: ModelSpec, rank: int, ranks: int, flag: str = "--tp") -> ModelSpec:
    """Return the model that one rank of several computes; the model itself where there is only one.

    Raises ConfigError, naming `flag`, for models that cannot be shared out so.
    """
    if ranks == 1:
        return spec
    _check(spec, ranks, flag)
    experts = spec.experts
    return replace(
        spec,
        heads=spec.heads // ranks,
        kv_heads=max(1, spec.kv_heads // ranks),
        intermediate_size=spec.intermediate_size // ranks,
        experts=None if experts is None else replace(experts, shared_width=experts.shared_width // ranks),
        share=Share(rank, ranks, spec),
    )


def _check(spec: ModelSpec, ranks: int, flag: str) -> None:
    if spec.generic is not None:
        raise ConfigError(
            f"{flag} {ranks}: {spec.architecture} is computed by transformers, which we cannot share out over ranks",
            field=flag,
        )
    divided = {"attention heads": spec.heads, "columns of its MLPs": spec.intermediate_size}
    if spec.experts is not None:
        divided["columns of its shared expert"] = spec.experts.shared_width
        if spec.expert_layers == spec.layers:
            del divided["columns of its MLPs"]
    for what, count in divided.items():
        if count % ranks:
            raise ConfigError(f"{flag} {ranks} does not divide the model's {count} {what}", field=flag)
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        raise ConfigError(
            f"{flag} {ranks} neither divides the model's {spec.kv_heads} key-value heads nor is a multiple of them",
            field=flag,
        )
    if spec.experts is not None and spec.experts.count < ranks:
        raise ConfigError(f"{flag} {ranks}: the model has only {spec.experts.count} experts", field=flag)
