"""Ranks that share out an adapter add what one that has all of it adds."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.models.adapters.test_products import MODELS, an_adapter, logits_with, merged, slots
from tests.unit.models.decoders.test_native_transformer import logits_of, native, plain, prompt
from tests.unit.models.shares.test_share import NativeCollective
from tests.unit.models.test_registry import saved
from twostroke.base.errors import ConfigError
from twostroke.engine.adapters.model_adapters import ModelAdapters, share_of_adapter
from twostroke.engine.adapters.over_ranks import OtherRankAdapters, PrepareAdapter, PutAdapter, RankedAdapters
from twostroke.engine.extras import ExtraMessage, OtherProcesses
from twostroke.kernels.cpu.build import Kernels
from twostroke.models.registry import read_spec
from twostroke.models.shares.shared_out import shares_in
from twostroke.scheduler.batch import Batch


@pytest.mark.parametrize("name", MODELS)
def test_natively_two_ranks_are_as_near_to_merged_weights_as_one(name: str, tmp_path: Path, kernels: Kernels) -> None:
    base = tmp_path / "base"
    saved(MODELS[name], base)
    adapter = an_adapter(base)
    exact, whole = plain(merged(base, adapter, tmp_path / "merged"), torch.float32), native(base, kernels)
    one = slots(base, torch.bfloat16, None).prepare(adapter)
    ranks = NativeCollective(base, kernels, 2)
    prepared = [(ModelAdapters(base, share, torch.bfloat16, linears=None).prepare(adapter),) for share in ranks.shares]
    usual, ours = 0.0, 0.0
    for seed in range(4):
        tokens = prompt(37, seed=seed)
        truth = logits_of(exact, tokens)
        logits = ranks.logits([tokens], [0], list(range(37)), prepared)
        assert logits is not None
        usual += float((logits_with(whole, tokens, one) - truth).abs().mean())
        ours += float((logits.float() - truth).abs().mean())
    assert ours < 1.3 * usual


def test_an_adapter_of_the_size_of_a_share_is_refused_by_each_rank(tmp_path: Path) -> None:
    saved(MODELS["llama"], tmp_path)
    share = shares_in(tmp_path, read_spec(tmp_path), 2, is_int8=False)[1]
    adapter = an_adapter(tmp_path)
    assert share.share is not None
    with pytest.raises(ConfigError, match="is adapted from"):
        ModelAdapters(tmp_path, share, torch.float32, linears=None).prepare(share_of_adapter(adapter, share.share))


def rows_of(*adapters: bytes | None) -> Batch:
    """A step of a row for each of these adapters."""
    none = np.zeros(len(adapters), np.int32)
    starts = np.arange(len(adapters) + 1, dtype=np.int32)
    return Batch(none, none, starts, none, none[:, None], none.astype(np.int64), adapters=adapters)


def test_all_ranks_have_the_adapters_of_the_first_one(tmp_path: Path) -> None:
    saved(MODELS["llama"], tmp_path)
    adapter = an_adapter(tmp_path)
    first, second = (
        ModelAdapters(tmp_path, share, torch.bfloat16, linears=None)
        for share in shares_in(tmp_path, read_spec(tmp_path), 2, is_int8=False)
    )
    other = OtherRankAdapters(second)

    def told(message: ExtraMessage) -> None:
        pickle.loads(pickle.dumps(message)).on(other)

    ranked = RankedAdapters(first, OtherProcesses(told, told))
    prepared = ranked.prepare(adapter)
    assert [*other.prepared] == [adapter.digest]
    ranked.put(adapter.digest, prepared)
    assert not other.prepared
    for rank in (first, second):
        assert (addresses := rank.of_step(rows_of(adapter.digest, None))) is not None
        assert [address > 0 for address in addresses.tolist()] == [True, False]
    ranked.drop(adapter.digest)
    for rank in (first, second):
        with pytest.raises(KeyError):
            rank.of_step(rows_of(adapter.digest))


def test_a_share_that_was_prepared_in_vain_goes_when_the_next_adapter_comes(tmp_path: Path) -> None:
    saved(MODELS["llama"], tmp_path)
    given_up, again, used, later = (an_adapter(tmp_path, seed) for seed in range(4))
    share = shares_in(tmp_path, read_spec(tmp_path), 2, is_int8=False)[1]
    own = ModelAdapters(tmp_path, share, torch.bfloat16, linears=None)
    other = OtherRankAdapters(own)
    for adapter in (again, given_up, used, again, later):
        PrepareAdapter(adapter).on(other)
    PutAdapter(used.digest).on(other)
    assert [*other.prepared] == [again.digest, later.digest]
    PutAdapter(again.digest).on(other)
    assert [*other.prepared] == [later.digest]
    assert 0 not in own.of_step(rows_of(used.digest, again.digest))


def test_what_one_rank_cannot_prepare_is_refused_and_kept_by_none(tmp_path: Path) -> None:
    saved(MODELS["llama"], tmp_path)
    adapter = an_adapter(tmp_path)
    first, second, third = (
        ModelAdapters(tmp_path, share, torch.bfloat16, linears=None)
        for share in (*shares_in(tmp_path, read_spec(tmp_path), 2, is_int8=False), read_spec(tmp_path))
    )
    others = [OtherRankAdapters(second), OtherRankAdapters(third)]

    def aside(message: ExtraMessage) -> None:
        for other in others:
            message.on(other)
        if isinstance(message, PrepareAdapter):
            raise ConfigError("1 of the other ranks could not do it: MemoryError")

    with pytest.raises(ConfigError, match="could not do it"):
        RankedAdapters(first, OtherProcesses(aside, aside)).prepare(adapter)
    assert not any(other.prepared for other in others)
