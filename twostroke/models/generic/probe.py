"""Runs one step of a model without weights, and makes a spec from the attention that each layer asks for.

The model is built on torch's meta device, where tensors have shapes and no numbers. So it takes no memory, and about a
second.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from twostroke.base.errors import UnsupportedModel
from twostroke.kernels.attention.rules import AttentionRule
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.ropes import no_rope
from twostroke.models.generic.interface import PROBED, SINKS, AttentionCall, SeenTokens, intercept, register
from twostroke.models.generic.refusals import cannot_run, refuse_by_config
from twostroke.models.spec import GenericWeights, ModelSpec

TOKENS: Final = 4
"""Tokens of the step that is run. No result depends on it."""
READ_OPTIONS: Final = {"sliding_window", "softcap", SINKS}
"""Options of attention that are computed."""
IDLE_OPTIONS: Final = {
    "dropout",
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "logits_to_keep",
    "is_causal",
}
"""Options without influence on attention here: those of the whole model, and those that matter only in training."""


def read_generic(published: PublishedConfig) -> ModelSpec:
    """Returns the spec of a model that transformers' code runs. Raises UnsupportedModel, naming the reason, for
    others."""
    refuse_by_config(published)
    register()
    model = _without_weights(published)
    calls = _calls_of(model, published)
    rules = tuple(_rule(call, published) for call in calls)
    first = calls[0]
    head_dim = int(first.key.shape[-1])
    return ModelSpec(
        architecture=type(model).__name__,
        hidden_size=int(model.get_input_embeddings().embedding_dim),
        layers=len(calls),
        heads=int(first.query.shape[1]),
        kv_heads=int(first.key.shape[1]),
        head_dim=head_dim,
        intermediate_size=_widest(model),
        vocab_size=int(published.config.vocab_size),
        max_position_embeddings=_longest(published),
        eos_token_ids=published.eos_token_ids(),
        ropes=(no_rope(head_dim),),
        norm_epsilon=0.0,
        layer_rules=rules,
        tie_word_embeddings=bool(published.config.tie_word_embeddings),
        generic=_weights_of(model),
    )


def _without_weights(published: PublishedConfig) -> Any:
    config = copy.deepcopy(published.config)
    config._experts_implementation = "batched_mm"  # other implementations read numbers, which meta tensors do not have
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation=PROBED).eval()
    except Exception as error:  # modelling code raises whatever a config leads to
        raise cannot_run(published, error) from error


def _calls_of(model: Any, published: PublishedConfig) -> Sequence[AttentionCall]:
    """Returns each layer's call of attention, in order. Raises UnsupportedModel where layers differ in shapes."""
    calls: list[AttentionCall] = []

    def record(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        batch, heads, tokens, _ = call.query.shape
        return call.query.new_empty(batch, tokens, heads, call.value.shape[-1])

    name = type(model).__name__
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise published.refusal(f"{name}, whose code takes no position_ids (alibi, or positions of its own),")
    intercept(model, record)
    some = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    try:
        with torch.inference_mode(), torch.device("meta"):
            model(input_ids=some, position_ids=some, attention_mask=torch.ones_like(some), use_cache=False)
    except UnsupportedModel:
        raise
    except Exception as error:  # modelling code raises whatever it finds
        raise cannot_run(published, error) from error
    _check_alike(calls, name, published)
    return calls


def _check_alike(calls: Sequence[AttentionCall], name: str, published: PublishedConfig) -> None:
    layers = published.config.num_hidden_layers
    if not calls:
        raise published.refusal(f"{name}, whose attention does not go through transformers' attention interface,")
    if len(calls) != layers:
        raise published.refusal(f"{name}, which calls attention {len(calls)} times in {layers} layers,")
    shapes = {(call.query.shape, call.key.shape, call.value.shape) for call in calls}
    if len(shapes) > 1:
        raise published.refusal(f"{name}, whose layers have heads of different numbers or widths,")
    query, key, value = next(iter(shapes))
    if not query[2] == key[2] == value[2] == TOKENS:
        raise published.refusal(f"{name}, whose attention sees other keys than those of the tokens,")
    if query[3] != key[3] or value[3] > key[3] or query[1] % key[1] or key[1] != value[1] or key[3] % 2:
        shapes_of = f"queries {tuple(query)}, keys {tuple(key)}, values {tuple(value)}"
        raise published.refusal(f"{name}, whose heads do not fit a page ({shapes_of}),")


def _rule(call: AttentionCall, published: PublishedConfig) -> AttentionRule:
    options = {name: value for name, value in call.options.items() if value is not None}
    unknown = sorted(options.keys() - READ_OPTIONS - IDLE_OPTIONS)
    if unknown or options.get("is_causal") is False:
        raise published.refusal(f"attention with {', '.join(unknown) or 'is_causal=False'}")
    window = options.get("sliding_window")
    if call.mask is not None:
        if not isinstance(call.mask, SeenTokens):
            raise published.refusal("a mask of the model's own")
        window = _window_of(call.mask, published)
    softcap = options.get("softcap")
    if not call.scale > 0:
        raise published.refusal(f"attention with scores times {call.scale}")
    return AttentionRule(scale=call.scale, window=window, softcap=None if softcap is None else float(softcap))


def _window_of(mask: SeenTokens, published: PublishedConfig) -> int | None:
    """Returns the size of the window; None where each row attends to all tokens up to itself. Raises UnsupportedModel
    for another mask."""
    size = mask.local_size
    far = 2 * (size or TOKENS)
    keys = torch.arange(far + 2)
    rows = torch.tensor(sorted({0, 1, far // 2 - 1, far // 2, far // 2 + 1, far, far + 1}))[:, None]
    zero = torch.zeros((), dtype=torch.long)
    try:
        seen = mask.allows(zero, zero, rows, keys).expand(len(rows), len(keys))
        causal = keys <= rows
        if torch.equal(seen, causal):
            return None
        if size is not None and torch.equal(seen, causal & (keys > rows - size)):
            return size
    except Exception as error:  # mask functions are code of the model
        raise cannot_run(published, error) from error
    raise published.refusal("a mask that is neither causal nor a window")


def _longest(published: PublishedConfig) -> int:
    longest = getattr(published.config, "max_position_embeddings", None) or published.max_model_len
    if longest is None:
        raise published.refusal("a config without max_position_embeddings (give --max-model-len)")
    return int(longest)


def _widest(model: Any) -> int:
    """Returns the number of outputs of the widest matrix product within layers."""
    head = model.get_output_embeddings()
    widths = [
        module.out_features for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head
    ]
    return max(widths, default=int(model.get_input_embeddings().embedding_dim))


def _weights_of(model: Any) -> GenericWeights:
    """Counts the weights of a model: those outside its head, and those inside."""
    model.tie_weights()
    head = model.get_output_embeddings()
    own: Mapping[int, torch.Tensor] = {id(parameter): parameter for parameter in model.base_model.parameters()}
    total = sum(math.prod(parameter.shape) for parameter in own.values())
    heads = [] if head is None else [parameter for parameter in head.parameters() if id(parameter) not in own]
    return GenericWeights(numbers=total, head_numbers=sum(math.prod(parameter.shape) for parameter in heads))
