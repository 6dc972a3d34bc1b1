"""What the engine must know of a model, as plain numbers: no torch and no transformers here."""

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
"""Bytes of a number of a norm that is stored in float32 whatever the model's dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions, with any scaling already worked into the numbers."""

    kind: str
    """"default", "linear", "llama3" and so on; for people, the arithmetic needs only the numbers."""
    inverse_frequencies: tuple[float, ...]
    """One per pair of dimensions, float32 values; 0 after all others for pairs that are not rotated."""
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
    experts have groups, a token uses experts only of its best groups.
    """

    count: int
    per_token: int
    width: int
    """The width between the two products of one expert."""
    is_normalised: bool
    """Whether the weights of a token's experts sum up to 1."""
    shared_width: int = 0
    """The width of a dense MLP that all tokens have besides. 0: none."""
    has_shared_gate: bool = True
    """Whether the answer of that MLP is multiplied by the sigmoid of a logit of its own."""
    is_sigmoid: bool = False
    """Whether an expert's score is the sigmoid of its logit (DeepSeek V3). A learned correction of each expert is added
    to it when experts are chosen, not when they are weighed; a group is as good as its two best experts together. Else
    scores are a softmax, and a group is as good as its best expert (DeepSeek V2)."""
    groups: int = 1
    """Groups of experts that lie side by side, all of one size."""
    groups_per_token: int = 1
    scaling: float = 1.0
    """Factor of the weights of a token's experts."""
    has_router_bias: bool = False

    @property
    def router_outputs(self) -> int:
        """Returns how many logits a token has: one for each expert, and one for the gate of a shared one."""
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
    """Whether files have rotated pairs side by side. Pages have them half the rotated part apart, as all models do."""

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
    """How many there are without the head."""
    head_numbers: int
    """How many the head has of its own; 0 where it is tied to the embedding."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a model one process of a worker computes."""

    index: int
    """The position of the process among them."""
    count: int
    """How many compute the model together."""
    whole: ModelSpec
    mlp_unit: int = 1
    """Neighbouring columns of an MLP that are all in one share."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def of(self, things: int) -> range:
        """Returns the range of this many things; of fewer than there are shares, the one that it has with others."""
        first = things * self.index // self.count
        return range(first, max(first + 1, things * (self.index + 1) // self.count))

    def columns(self, width: int) -> range:
        """Returns the range of the columns of an MLP. Shares have as many as each other, or a unit more."""
        own = self.of(width // self.mlp_unit) if width else range(0)
        return range(own.start * self.mlp_unit, own.stop * self.mlp_unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str
    """A name among `families.FAMILIES`, which says how its tensors are called; any name where `generic` is given."""
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    """The width between the two products of a dense MLP."""
    vocab_size: int
    max_position_embeddings: int
    """Tokens that the model was made for, rope scaling included."""
    eos_token_ids: tuple[int, ...]
    ropes: tuple[RopeSpec, ...]
    """At least one. `AttentionRule.rope` says which of them a layer uses."""
    norm_epsilon: float
    layer_rules: tuple[AttentionRule, ...] = ()
    """One for each layer; none where all see all tokens up to themselves, and scores have the usual scale."""
    activation: Activation = GATED_SILU
    """The activation of every MLP."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    """Whether products of MLPs, those of experts among them, have biases."""
    has_sinks: bool = False
    """Whether the softmax of each head has one more score, a weight of the layer, with the value zero (gpt-oss)."""
    qk_norm: bool = False
    """Whether each head of q and k is normalised before it is rotated (Qwen3, Gemma 3)."""
    is_layer_norm: bool = False
    """Whether norms take the mean away and add a bias (GPT-2, GPT-NeoX); else they are RMS norms."""
    has_wide_norms: bool = False
    """Whether norms multiply in float32, whatever the dtype (Gemma)."""
    has_output_norms: bool = False
    """Whether attention and MLP end with a norm before their sum with the residual stream (Gemma)."""
    is_parallel: bool = False
    """Whether attention and MLP of a layer have the same input (GPT-NeoX)."""
    has_position_table: bool = False
    """Whether a learned vector of each position is added to the embedding (GPT-2)."""
    embedding_scale: float = 1.0
    """Factor of the embedding, rounded to the model's dtype."""
    final_softcap: float | None = None
    """Logits l become final_softcap * tanh(l / final_softcap)."""
    experts: ExpertSpec | None = None
    """What stands for the MLP in all layers but `dense_layers`."""
    dense_layers: tuple[int, ...] = ()
    """Layers with a dense MLP in a model that has experts."""
    latents: LatentSpec | None = None
    """What pages hold in place of keys and values (DeepSeek). `kv_heads` is 1 then, and `head_dim` that of its keys."""
    generic: GenericWeights | None = None
    """Given where transformers' code computes the model. Then only what attention and pages need is true of the fields
    above, and all positions are in queries and keys before attention sees them."""
    share: Share | None = None
    """Given for the part of a model that one process computes: then heads, widths of MLPs and the held experts are its
    own. None: all of the model."""

    @property
    def whole(self) -> ModelSpec:
        """Returns the model that this is a share of."""
        return self if self.share is None else self.share.whole

    @property
    def vocabulary(self) -> range:
        """Returns the tokens with logits that are computed here."""
        return range(self.vocab_size) if self.share is None else self.share.of(self.vocab_size)

    @property
    def held_experts(self) -> range:
        """Returns which experts of a layer are computed here."""
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
        """Returns how many MLPs of each width there are in all layers; or of those that one token has."""
        widths = Counter({self.intermediate_size: self.layers - self.expert_layers})
        if self.experts is not None:
            each = self.experts.per_token if of_one_token else len(self.held_experts)
            widths[self.experts.width] += each * self.expert_layers
            widths[self.experts.shared_width] += self.expert_layers
        return {width: count for width, count in widths.items() if width and count}

    @property
    def widest_mlp(self) -> int:
        """Returns the width of what one token is between and after the products of the widest MLP."""
        if self.experts is None:
            return self.intermediate_size
        mixed = self.experts.per_token * (self.experts.width + self.hidden_size) + self.experts.shared_width
        return max(self.intermediate_size, mixed) if self.dense_layers else mixed

    @property
    def has_key_bias(self) -> bool:
        """Whether rope rotates keys that have a bias, which no norm changed."""
        return self.qkv_bias and not self.qk_norm and self.latents is None

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """Returns which layers have pages of their own, the full group first."""
        return page_groups_of(self.rules)

    def page_shape(self, block_size: int) -> PageShape:
        """Returns the dimensions of all layers of one block."""
        latent_dim = None if self.latents is None else self.latents.latent_dim
        return PageShape(self.layers, self.kv_heads, block_size, self.head_dim, latent_dim)

    @property
    def attended_width(self) -> int:
        """Returns the numbers of what the attention of a layer gives to its output projection."""
        return self.heads * (self.head_dim if self.latents is None else self.latents.value_dim)

    @property
    def query_matrices(self) -> Mapping[str, tuple[int, int]]:
        """Returns the outputs and inputs of the projection of a layer's query latents, by name; none without those."""
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
        """Bytes of all weights as a worker holds them; a head that is tied to the embedding takes none of its own.

        `of_one_token` leaves away experts that a token has not, where we know of them.
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
        """Returns the bytes of all experts of a layer, without biases. A device stacks them from as many others."""
        if self.experts is None:
            return 0
        numbers = self.experts.count * self.experts.width * self.hidden_size * (self.activation.width + 1)
        return numbers * DTYPE_BYTES[dtype]

    def _latent_numbers(self) -> int:
        """Returns the weights of one layer that make queries, keys and values of latents, norms included."""
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
        """Returns the bytes of the embedding, which are as many as those of a head."""
        return self.vocab_size * self.hidden_size * DTYPE_BYTES[dtype]

    def position_bytes(self, dtype: str) -> int:
        """Returns the bytes of the table of learned positions."""
        return self.max_position_embeddings * self.hidden_size * DTYPE_BYTES[dtype] * self.has_position_table
