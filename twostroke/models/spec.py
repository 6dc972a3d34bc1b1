"""The facts that the engine needs about a model, as plain numbers: no torch and no transformers here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from twostroke.kernels.activation import GATED_SILU, Activation
from twostroke.kernels.attention.rules import AttentionRule, page_groups_of
from twostroke.kv_cache.form import page_form
from twostroke.kv_cache.groups.page_group import PageGroup
from twostroke.page_forms.page_form import PageShape

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
NORM_BYTES: Final = 4
"""Bytes of a weight of a norm that is stored in float32 whatever the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions. The numbers include any scaling of frequencies."""

    kind: str
    """The rope type, such as "default", "linear" or "llama3". It is for people; the arithmetic needs only the numbers.
    """
    inverse_frequencies: tuple[float, ...]
    """One float32 value for each pair of dimensions. Those of pairs that are not rotated are 0 and last."""
    attention_scaling: float = 1.0
    """Factor on cosine and sine of the rotated pairs (yarn, longrope)."""

    @property
    def rotated_pairs(self) -> int:
        """Returns how many pairs of dimensions are rotated."""
        return sum(frequency != 0 for frequency in self.inverse_frequencies)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """Experts of a layer. Each token uses some of them: those of its highest router logits, weighted by a softmax.

    A softmax over all experts, with the chosen weights normalised, equals a softmax over only the chosen experts. Where
    experts have groups, a token uses only experts of its best groups.
    """

    count: int
    per_token: int
    width: int
    """The number of channels between the two matrix products of one expert."""
    is_normalised: bool
    """Whether the weights of a token's experts sum up to 1."""
    shared_width: int = 0
    """The width of the shared expert, a dense MLP that also computes all tokens. 0: there is none."""
    has_shared_gate: bool = True
    """Whether the output of the shared expert is multiplied by the sigmoid of its own logit."""
    is_sigmoid: bool = False
    """Whether an expert's score is the sigmoid of its logit (DeepSeek V3). A learned correction of each expert is added
    to its score when experts are chosen, but not to its weight. A group's score is then the sum of its two best
    experts' scores. Otherwise scores are a softmax, and a group's score is that of its best expert (DeepSeek V2)."""
    groups: int = 1
    """Number of groups of neighbouring experts, all of one size."""
    groups_per_token: int = 1
    scaling: float = 1.0
    """Factor on the weights of a token's experts."""
    has_router_bias: bool = False

    @property
    def router_outputs(self) -> int:
        """Returns how many logits a token has: one for each expert, and one for the gate of a shared expert."""
        return self.count + bool(self.shared_width and self.has_shared_gate)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: a token's keys and values in all heads are made from one latent and one rotated key.

    Pages hold both, side by side. Queries are projected into the space of latents, so that heads attend to the pages
    themselves: the model has one kv head, and its values are the latents.
    """

    latent_dim: int
    """Numbers of a latent."""
    plain_dim: int
    """Numbers of a head's query and key that are not rotated (qk_nope_head_dim)."""
    rope_dim: int
    """Numbers of a head's query that are rotated, and of the key that all heads share."""
    value_dim: int
    """Numbers of a head's value."""
    query_latent_dim: int | None
    """Numbers of the latent that queries are made from; None where they are made from the hidden state."""
    norm_epsilon: float
    """The epsilon of the norms of latents, which is not that of the model's other norms."""
    is_interleaved: bool
    """Whether files store the two channels of a rotated pair side by side. Pages store them half the rotated part
    apart, as for all models."""

    @property
    def key_dim(self) -> int:
        """Returns the numbers that pages hold of a token: its latent, and then its rotated key."""
        return self.latent_dim + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Returns the numbers of a head's query before it is projected into the space of latents."""
        return self.plain_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GenericWeights:
    """The weights of a model that transformers' code computes. Only that code knows what they are."""

    numbers: int
    """Number of weights without the head."""
    head_numbers: int
    """Number of weights that only the head has; 0 where it is tied to the embedding."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a model that one process of a worker computes."""

    index: int
    """The position of the process among the worker's processes."""
    count: int
    """Number of processes that compute the model together."""
    whole: ModelSpec
    mlp_unit: int = 1
    """Neighbouring columns of an MLP that are all in one share."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def of(self, things: int) -> range:
        """Returns this share's range of this many things. Where there are fewer than shares, several shares have the
        same one."""
        first = things * self.index // self.count
        return range(first, max(first + 1, things * (self.index + 1) // self.count))

    def columns(self, width: int) -> range:
        """Returns this share's range of the columns of an MLP. The sizes of two shares differ by one unit at most."""
        own = self.of(width // self.mlp_unit) if width else range(0)
        return range(own.start * self.mlp_unit, own.stop * self.mlp_unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str
    """A key of `families.FAMILIES`, which determines the names of tensors; any name where `generic` is given."""
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    """The number of channels between the two matrix products of a dense MLP."""
    vocab_size: int
    max_position_embeddings: int
    """Most tokens of a sequence that the model was made for, rope scaling included."""
    eos_token_ids: tuple[int, ...]
    ropes: tuple[RopeSpec, ...]
    """At least one rope. `AttentionRule.rope` is the index of the one that a layer uses."""
    norm_epsilon: float
    layer_rules: tuple[AttentionRule, ...] = ()
    """The attention rule of each layer. It is empty where all layers attend to all tokens up to themselves, with the
    usual scale."""
    activation: Activation = GATED_SILU
    """The activation of every MLP."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    """Whether matrix products of MLPs, including those of experts, have biases."""
    has_sinks: bool = False
    """Whether the softmax of each head has one more score, a weight of the layer, with the value zero (gpt-oss)."""
    qk_norm: bool = False
    """Whether each head of q and k is normalised before it is rotated (Qwen3, Gemma 3)."""
    is_layer_norm: bool = False
    """Whether norms subtract the mean and add a bias (GPT-2, GPT-NeoX). Otherwise they are RMS norms."""
    has_wide_norms: bool = False
    """Whether norms multiply in float32, whatever the dtype (Gemma)."""
    has_output_norms: bool = False
    """Whether attention and MLP end with a norm before their sum with the residual stream (Gemma)."""
    is_parallel: bool = False
    """Whether attention and MLP of a layer have the same input (GPT-NeoX)."""
    has_position_table: bool = False
    """Whether a learned vector of each position is added to the embedding (GPT-2)."""
    embedding_scale: float = 1.0
    """Factor on the embedding, rounded to the model's dtype."""
    final_softcap: float | None = None
    """Logits l become final_softcap * tanh(l / final_softcap)."""
    experts: ExpertSpec | None = None
    """The experts that replace the MLP in all layers but `dense_layers`."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a dense MLP in a model that has experts."""
    latents: LatentSpec | None = None
    """The latents that pages hold in place of keys and values (DeepSeek). Then `kv_heads` is 1, and `head_dim` that of
    its keys."""
    generic: GenericWeights | None = None
    """Given where transformers' code computes the model. Then the fields above are only true as far as attention and
    pages need them, and queries and keys contain all positions before they reach our attention."""
    share: Share | None = None
    """Given where this is the part of a model that one process computes. Heads, widths of MLPs and held experts are
    then those of the part. None: this is all of the model."""

    @property
    def whole(self) -> ModelSpec:
        """Returns the model that this is a share of."""
        return self if self.share is None else self.share.whole

    @property
    def vocabulary(self) -> range:
        """Returns the tokens whose logits are computed here."""
        return range(self.vocab_size) if self.share is None else self.share.of(self.vocab_size)

    @property
    def held_experts(self) -> range:
        """Returns the experts of a layer that are computed here."""
        count = 0 if self.experts is None else self.experts.count
        return range(count) if self.share is None else self.share.of(count)

    @property
    def rules(self) -> tuple[AttentionRule, ...]:
        """Returns the rule of each layer's attention."""
        return self.layer_rules or (AttentionRule(scale=self.head_dim**-0.5),) * self.layers

    def experts_of(self, layer: int) -> ExpertSpec | None:
        """Returns the experts of a layer; None for a dense one."""
        return None if layer in self.dense_layers else self.experts

    @property
    def expert_layers(self) -> int:
        """Returns how many layers have experts."""
        return 0 if self.experts is None else self.layers - len(self.dense_layers)

    def mlp_widths(self, *, of_one_token: bool = False) -> Mapping[int, int]:
        """Returns how many MLPs of each width there are in all layers, or only among those that compute one token."""
        widths = Counter({self.intermediate_size: self.layers - self.expert_layers})
        if self.experts is not None:
            each = self.experts.per_token if of_one_token else len(self.held_experts)
            widths[self.experts.width] += each * self.expert_layers
            widths[self.experts.shared_width] += self.expert_layers
        return {width: count for width, count in widths.items() if width and count}

    @property
    def widest_mlp(self) -> int:
        """Returns how many numbers one token takes in the widest layer, between and after the matrix products of its
        MLPs."""
        if self.experts is None:
            return self.intermediate_size
        mixed = self.experts.per_token * (self.experts.width + self.hidden_size) + self.experts.shared_width
        return max(self.intermediate_size, mixed) if self.dense_layers else mixed

    @property
    def has_key_bias(self) -> bool:
        """Whether rope rotates keys that have a bias and no norm."""
        return self.qkv_bias and not self.qk_norm and self.latents is None

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """Returns the page groups of the layers, the full group first."""
        return page_groups_of(self.rules)

    def page_shape(self, block_size: int) -> PageShape:
        """Returns the dimensions of a page that holds all layers of one block."""
        latent_dim = None if self.latents is None else self.latents.latent_dim
        return PageShape(self.layers, self.kv_heads, block_size, self.head_dim, latent_dim)

    @property
    def attended_width(self) -> int:
        """Returns the width of the input of a layer's output projection."""
        return self.heads * (self.head_dim if self.latents is None else self.latents.value_dim)

    @property
    def query_matrices(self) -> Mapping[str, tuple[int, int]]:
        """Returns the outputs and inputs of the projection of a layer's query latents, by name; empty where queries
        have no latents."""
        if self.latents is None or self.latents.query_latent_dim is None:
            return {}
        return {"q_b_proj": (self.heads * self.latents.query_dim, self.latents.query_latent_dim)}

    @property
    def attention_inputs(self) -> Mapping[str, int]:
        """Returns the outputs of the projections of a layer's normalised input, by name, in order."""
        if self.latents is None:
            kv_rows = self.kv_heads * self.head_dim
            return {"q_proj": self.heads * self.head_dim, "k_proj": kv_rows, "v_proj": kv_rows}
        latents = self.latents
        if latents.query_latent_dim is None:
            return {"q_proj": self.heads * latents.query_dim, "kv_a_proj_with_mqa": latents.key_dim}
        return {"q_a_proj": latents.query_latent_dim, "kv_a_proj_with_mqa": latents.key_dim}

    def page_shapes(self, block_size: int, groups: Sequence[PageGroup]) -> tuple[PageShape, ...]:
        """Returns the dimensions of a page of each of some groups, to which all layers belong."""
        whole = self.page_shape(block_size)
        return (whole,) if len(groups) == 1 else tuple(whole.of_layers(group.layers) for group in groups)

    def page_bytes(self, block_size: int, form: str) -> int:
        """Returns the bytes of K and V of all layers of one block in a form that `page_form` takes."""
        return page_form(form).page_bytes(self.page_shape(block_size))

    def weight_bytes(self, dtype: str, *, with_head: bool, of_one_token: bool = False) -> int:
        """Returns the bytes of all weights. A head that is tied to the embedding adds none.

        `of_one_token` leaves out experts that a token does not use, where we know them.
        """
        if self.generic is not None:
            return (self.generic.numbers + self.generic.head_numbers * with_head) * DTYPE_BYTES[dtype]
        inputs = sum(self.attention_inputs.values()) * (self.hidden_size + self.qkv_bias)
        output = self.hidden_size * (self.attended_width + self.attention_output_bias)
        layers = self.layers * (inputs + output + self._latent_numbers())
        for width, count in self.mlp_widths(of_one_token=of_one_token).items():
            inner = self.activation.width * width * (self.hidden_size + self.mlp_bias)
            layers += count * (inner + self.hidden_size * (width + self.mlp_bias))
        if self.experts is not None:
            layers += (
                self.expert_layers * self.experts.router_outputs * (self.hidden_size + self.experts.has_router_bias)
            )
        layers += self.layers * self.heads * self.has_sinks
        norm = self.hidden_size * (1 + self.is_layer_norm)
        norms = self.layers * (norm * (4 if self.has_output_norms else 2) + 2 * self.head_dim * self.qk_norm) + norm
        norm_bytes = norms * (NORM_BYTES if self.has_wide_norms else DTYPE_BYTES[dtype])
        has_own_head = with_head and not self.tie_word_embeddings
        head_bytes = len(self.vocabulary) * self.hidden_size * DTYPE_BYTES[dtype] * has_own_head
        table_bytes = self.table_bytes(dtype) + self.position_bytes(dtype)
        return layers * DTYPE_BYTES[dtype] + norm_bytes + table_bytes + head_bytes + self._correction_bytes()

    def expert_bytes(self, dtype: str) -> int:
        """Returns the bytes of all experts of a layer, without biases. While a device stacks them, they take twice as
        much."""
        if self.experts is None:
            return 0
        numbers = self.experts.count * self.experts.width * self.hidden_size * (self.activation.width + 1)
        return numbers * DTYPE_BYTES[dtype]

    def _latent_numbers(self) -> int:
        """Returns the number of a layer's weights that make queries, keys and values from latents, norms included."""
        latents = self.latents
        if latents is None:
            return 0
        queries = (
            0 if latents.query_latent_dim is None else latents.query_latent_dim * (1 + self.heads * latents.query_dim)
        )
        return queries + latents.latent_dim * (1 + self.heads * (latents.plain_dim + latents.value_dim))

    def _correction_bytes(self) -> int:
        """Returns the bytes of the corrections of experts' scores, which are float32 whatever the dtype."""
        if self.experts is None or not self.experts.is_sigmoid:
            return 0
        return self.expert_layers * self.experts.count * NORM_BYTES

    def table_bytes(self, dtype: str) -> int:
        """Returns the bytes of the embedding. A head takes as many."""
        return self.vocab_size * self.hidden_size * DTYPE_BYTES[dtype]

    def position_bytes(self, dtype: str) -> int:
        """Returns the bytes of the table of learned positions."""
        return self.max_position_embeddings * self.hidden_size * DTYPE_BYTES[dtype] * self.has_position_table
