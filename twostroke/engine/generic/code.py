"""Models that run by the code of transformers, as a runner loads and tries them. Only they load that library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig

if TYPE_CHECKING:  # torch, which a fleet of paced workers does without
    import torch

    from twostroke.engine.determinism import Determinism
    from twostroke.kernels.attention.interface import AttentionBackend
    from twostroke.kernels.pools.parted_pool import AnyPool
    from twostroke.kv_cache.memory import PageMemory
    from twostroke.models.decoders.choice import LoadOptions
    from twostroke.models.decoders.transformer import Model
    from twostroke.models.spec import ModelSpec


class GenericCode:
    """See `twostroke.engine.extras.ForeignCode`."""

    def load(self, directory: Path, spec: ModelSpec, backend: AttentionBackend, options: LoadOptions) -> Model:
        from twostroke.models.generic.checkpoint import load_checkpoint
        from twostroke.models.generic.paged_model import PagedModel

        if options.is_int8:
            raise ConfigError(
                f"--weights int8 is not computed for {spec.architecture}, which transformers runs; "
                "leave --weights away to serve the weights as they are",
                field="weights",
            )
        model, _ = load_checkpoint(directory, options.dtype, with_head=options.with_head)
        return PagedModel(model, spec, backend, options.dtype)

    def tried(
        self,
        model: Model,
        memory: PageMemory,
        angles: tuple[torch.Tensor, torch.Tensor],
        spec: ModelSpec,
        config: ModelConfig,
        pool: AnyPool,
    ) -> Determinism:
        from twostroke.engine.generic.trial import tried
        from twostroke.models.generic.paged_model import PagedModel

        assert isinstance(model, PagedModel)
        return tried(model, memory, angles, spec, config, pool)
