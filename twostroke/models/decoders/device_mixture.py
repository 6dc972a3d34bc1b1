"""A mixture of experts on a device. Pairs of rows and experts are grouped there."""

from __future__ import annotations

import torch
from torch.nn import functional

from twostroke.kernels.products.device_linear import between
from twostroke.kernels.products.elementwise import Elementwise
from twostroke.kernels.products.grouped import GroupedProducts, RoutedPairs
from twostroke.kernels.products.stored import plain
from twostroke.models.decoders.mixture import chosen_experts
from twostroke.models.expert_load import ExpertLoad
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.products import Mlp
from twostroke.models.weights.tensors import StackedExperts


class DeviceMixture:
    """The mixtures of all layers. Shapes follow only from the number of rows, so that steps can be recorded."""

    def __init__(
        self, spec: ModelSpec, device: torch.device, elementwise: Elementwise, grouped: GroupedProducts
    ) -> None:
        self._spec = spec
        self._elementwise = elementwise
        self._grouped = grouped
        self._held = spec.held_experts
        layers = [layer for layer in range(spec.layers) if spec.experts_of(layer) is not None]
        experts = 0 if spec.experts is None else spec.experts.count
        self._tokens = torch.zeros(len(layers), experts, dtype=torch.int64, device=device)
        self._tokens_of = dict(zip(layers, self._tokens, strict=True))
        self._published = torch.zeros(self._tokens.shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.load = ExpertLoad(self._published.numpy()) if layers else None
        """Tokens of each expert, as of the latest `publish`; None for a dense model."""

    def __call__(
        self,
        layer: int,
        x: torch.Tensor,
        stacked: StackedExperts,
        shared: Mlp | None,
        count: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the sum of the outputs of the experts held here for each row of x [rows, hidden], added by ascending
        expert in float32."""
        experts, activation = self._spec.experts, self._spec.activation
        assert experts is not None
        logits = functional.linear(x.float(), stacked.router, stacked.router_bias)
        chosen, weights = chosen_experts(logits[:, : experts.count], experts, stacked.correction)
        chosen, order = chosen.sort(dim=1)
        self._count(layer, chosen, count)
        local = self._local(chosen)
        pairs = RoutedPairs.of(local, len(self._held))
        gates = self._grouped.gathered(x, plain(stacked.inner.weight), stacked.inner.bias, pairs)
        inner = between(gates, activation, self._elementwise)
        answers = self._grouped.scattered(inner, plain(stacked.down.weight), stacked.down.bias, pairs)
        if self._spec.share is not None:
            answers.masked_fill_(local.view(-1, 1) == len(self._held), 0.0)
        total = self._grouped.combined(answers, weights.gather(1, order))
        if shared is not None:
            answer = shared.down(shared.inner(x))
            total += logits[:, experts.count :].sigmoid() * answer if experts.has_shared_gate else answer
        return total.to(x.dtype)

    def _local(self, chosen: torch.Tensor) -> torch.Tensor:
        """Returns the chosen experts' indices among those held here. An expert that is not held here gets their
        count."""
        if self._spec.share is None:
            return chosen
        local, count = chosen - self._held.start, len(self._held)
        return local.masked_fill_((local < 0) | (local > count), count)

    def _count(self, layer: int, chosen: torch.Tensor, count: torch.Tensor | None) -> None:
        tokens = torch.ones_like(chosen)
        if count is not None:
            tokens *= torch.arange(len(chosen), device=chosen.device)[:, None] < count
        self._tokens_of[layer].scatter_add_(0, chosen.flatten(), tokens.flatten())

    def publish(self) -> None:
        """Starts to copy the counts to the host, without waiting for the copy."""
        if self.load is not None:
            self._published.copy_(self._tokens, non_blocking=True)

    def forget(self) -> None:
        """Sets all counts to zero."""
        self._tokens.zero_()
