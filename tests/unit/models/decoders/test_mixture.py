"""Mixtures of experts: who is chosen, what they add up to, how their weights lie in files, what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from tests.unit.models.decoders.test_native_transformer import Served, logits_of, native, plain, prompt
from tests.unit.models.family_configs import CONFIGS, EXPERTS
from tests.unit.models.test_families import Pages, greedy, reference
from tests.unit.models.test_registry import SIZES, our_logits, saved
from twostroke.base.errors import ConfigError, UnsupportedModel
from twostroke.kernels.activation import GATED_SILU
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.products.steady import SteadyLinears
from twostroke.models.decoders.mixture import chosen_experts, mixture
from twostroke.models.registry import read_spec
from twostroke.models.spec import ExpertSpec
from twostroke.models.weights.products import Experts, Mlp

WIDE: dict[str, Any] = SIZES | {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64}


def experts_of(**changes: Any) -> ExpertSpec:
    return ExpertSpec(**({"count": 4, "per_token": 2, "width": 8, "is_normalised": True} | changes))


def test_of_equal_experts_the_lower_one_is_chosen() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0], [0.0, 2.0, 5.0, 2.0]])
    chosen, _ = chosen_experts(logits, experts_of())
    assert chosen.tolist() == [[1, 2], [0, 1], [2, 1]]


def test_normalised_weights_are_a_softmax_over_the_chosen_experts() -> None:
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    chosen, weights = chosen_experts(logits, experts_of())
    torch.testing.assert_close(weights, logits.gather(1, chosen).softmax(-1))
    _, others = chosen_experts(logits, experts_of(is_normalised=False))
    torch.testing.assert_close(others, logits.softmax(-1).gather(1, chosen))


def test_native_kernels_choose_the_lower_of_equal_experts(tmp_path: Path, kernels: Kernels) -> None:
    model = saved(Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16), tmp_path)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[4:] = layer.mlp.gate.weight[3]
    model.save_pretrained(tmp_path)
    load = counted(native(tmp_path, kernels), 40)
    assert load[:, 3].sum() >= load[:, 4].sum() >= load[:, 5].sum() >= load[:, 6].sum()
    assert load[:, 3].sum() > load[:, 6].sum() == 0, "of four equal experts no token has all, as each has three"


def counted(served: Served, length: int) -> Any:
    logits_of(served, prompt(length))
    assert served.model.expert_load is not None
    return served.model.expert_load.tokens


@pytest.mark.parametrize("name", ["qwen2_moe, some layers dense", "deepseek_v2", "deepseek_v3"])
def test_every_token_is_counted_at_each_of_its_experts(name: str, tmp_path: Path, kernels: Kernels) -> None:
    reference(CONFIGS[name], tmp_path)
    ours, theirs = counted(native(tmp_path, kernels), 40)[:1], counted(plain(tmp_path, torch.float32), 40)[:1]
    assert ours.shape == theirs.shape
    assert ours.sum() == theirs.sum() == 40 * 3
    assert abs(ours - theirs).sum() <= 6, "bfloat16 may turn a choice between two experts that are nearly equal"


def test_experts_lie_in_the_best_groups_and_a_correction_does_not_weigh() -> None:
    spec = experts_of(count=6, is_sigmoid=True, groups=3, groups_per_token=1, scaling=2.0, is_normalised=False)
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.0, -9.0, 2.0]])
    none, high = torch.zeros(6), torch.tensor([0.0, 0.0, 0.0, 0.0, 5.0, 0.0])
    for correction, expected in ((none, [2, 3]), (high, [4, 5])):
        chosen, weights = chosen_experts(logits, spec, correction)
        assert sorted(chosen[0].tolist()) == expected, "a group is as good as its two best experts together"
        torch.testing.assert_close(weights, 2 * logits.gather(1, chosen).sigmoid())
    chosen, _ = chosen_experts(logits, experts_of(count=6, groups=3, groups_per_token=1))
    assert sorted(chosen[0].tolist()) == [0, 1], "by a softmax a group is as good as its best expert"


def test_a_dense_model_counts_no_experts(tmp_path: Path, kernels: Kernels) -> None:
    saved(Qwen3Config(**SIZES, head_dim=16), tmp_path)
    assert native(tmp_path, kernels).model.expert_load is None


def dense_and_as_experts(folder: Path) -> Any:
    """Saves a dense model, and the same with copies of its MLPs for experts; returns the dense one."""
    sizes = SIZES | {"head_dim": 16}
    model = reference(Qwen3Config(**sizes), folder / "dense")
    config = Qwen3MoeConfig(**sizes, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=80)
    config.norm_topk_prob = True
    copy = saved(config, folder / "experts")
    given = model.state_dict()
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            if name in given:
                parameter.copy_(given[name])
        for layer, of in zip(copy.model.layers, model.model.layers, strict=True):
            layer.mlp.experts.gate_up_proj.copy_(torch.cat((of.mlp.gate_proj.weight, of.mlp.up_proj.weight)))
            layer.mlp.experts.down_proj.copy_(of.mlp.down_proj.weight)
    copy.save_pretrained(folder / "experts")
    return model


def test_experts_that_are_copies_of_an_mlp_give_the_tokens_of_the_dense_model(tmp_path: Path, kernels: Kernels) -> None:
    model = dense_and_as_experts(tmp_path)
    tokens = prompt(60).tolist()
    expected = greedy(model, tokens, 24)
    for usable in (kernels, None):
        assert Pages(tmp_path / "experts", usable, "float32").answer(tokens, 24) == expected
    dense, experts = (logits_of(native(tmp_path / name, kernels), prompt(40)) for name in ("dense", "experts"))
    assert (dense - experts).abs().mean() < 0.02 * dense.std()


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe, some layers dense"])
def test_files_with_all_experts_in_one_tensor_are_read_too(name: str, tmp_path: Path) -> None:
    saved(CONFIGS[name], tmp_path / "by expert")
    saved(CONFIGS[name], tmp_path / "fused", save_original_format=False)
    tokens = prompt(20)
    assert torch.equal(our_logits(tmp_path / "fused", tokens), our_logits(tmp_path / "by expert", tokens))


def test_int8_experts_stay_near_the_truth_and_routers_are_exact(tmp_path: Path, kernels: Kernels) -> None:
    saved(Qwen3MoeConfig(**WIDE, num_experts=6, num_experts_per_tok=2), tmp_path)
    truth = logits_of(plain(tmp_path, torch.float32), prompt(37))
    exact, rounded = (logits_of(native(tmp_path, kernels, is_int8=is_int8), prompt(37)) for is_int8 in (False, True))
    assert not torch.equal(exact, rounded)
    assert (rounded - truth).abs().mean() < 0.1 * truth.std()


def test_a_row_of_steady_products_has_the_same_bits_alone_and_in_company() -> None:
    spec, linears = experts_of(count=6, per_token=2, shared_width=24), SteadyLinears()
    draw = torch.Generator().manual_seed(2)

    def mlp() -> Mlp:
        inner, down = (torch.randn(shape, generator=draw) for shape in ((48, 32), (32, 24)))
        return Mlp(linears.activated(inner, None, GATED_SILU), linears.linear(down))

    experts = Experts(linears.exact(torch.randn(7, 32, generator=draw)), tuple(mlp() for _ in range(6)))
    shared, x, tokens = mlp(), torch.randn(40, 32, generator=draw), torch.zeros(6, dtype=torch.int64)
    together = mixture(x, experts, shared, spec, tokens)
    assert int(tokens.sum()) == 80
    for row in range(0, 40, 7):
        assert torch.equal(mixture(x[row : row + 1], experts, shared, spec, tokens)[0], together[row])


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3_moe", "num_experts_per_tok", 8),
        ("mixtral", "num_experts_per_tok", 0),
        ("qwen2_moe", "decoder_sparse_step", 0),
        ("qwen2_moe", "hidden_act", "relu2"),
    ],
)
def test_what_no_experts_can_be_is_refused_by_key(name: str, key: str, value: object, tmp_path: Path) -> None:
    config = CONFIGS[name].to_dict() | {key: value}
    type(CONFIGS[name])(**config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as refusal:
        read_spec(tmp_path)
    assert ("activation" if key == "hidden_act" else key) in refusal.value.message


def test_an_expert_that_no_file_has_is_named(tmp_path: Path) -> None:
    for is_fused in (False, True):
        folder = tmp_path / str(is_fused)
        saved(CONFIGS["qwen3_moe"], folder, save_original_format=not is_fused)
        config = folder / "config.json"
        config.write_text(
            config.read_text()
            .replace('"num_experts": 7', '"num_experts": 8')
            .replace('"num_local_experts": 7', '"num_local_experts": 8')
        )
        with pytest.raises(ConfigError, match=r"experts|gate\.weight has shape \(7"):
            our_logits(folder, prompt(3))
