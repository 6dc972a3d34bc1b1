"""Models: attention, page forms, formats of weights, experts, ranks, adapters and cores."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        name="context-of-tiles",
        claim="attention beyond one tile of rows sees what each row may see",
        file="twostroke/kernels/torch_attention/gathered.py",
        old="tiles.append(Tile(rows, context_len - (end - rows.stop), batch.positions[rows], {}))",
        new=(
            "tiles.append(Tile(rows, min(context_len, context_len - (end - rows.stop) + 1), "
            "batch.positions[rows] + 1, {}))"
        ),
        test=(
            "tests/unit/kernels/page_forms/test_page_forms.py::test_pages_hold_what_the_reference_writes_and_rows_come_out_as_it_computes_them"
        ),
    ),
    Mutant(
        name="window-of-one-more",
        claim="a token of a layer with a window sees that many tokens",
        file="twostroke/kernels/attention/rules.py",
        old="return seen if self.window is None else seen & (keys > positions - self.window)",
        new="return seen if self.window is None else seen & (keys >= positions - self.window)",
        test=(
            "tests/unit/kernels/attention/test_rules.py::test_the_native_kernel_obeys_the_layer_s_rule_and_a_row_is_the_same_bits_alone"
        ),
    ),
    Mutant(
        name="first-key-of-windows",
        claim="a token of a layer with a window sees that many tokens",
        file="twostroke/kernels/attention/rules.py",
        old="max(0, position - self.window + 1)",
        new="max(0, position - self.window + 2)",
        test=(
            "tests/unit/kernels/attention/test_rules.py::test_the_native_kernel_obeys_the_layer_s_rule_and_a_row_is_the_same_bits_alone"
        ),
    ),
    Mutant(
        name="soft-cap",
        claim="scores of models with a soft cap are capped",
        file="twostroke/kernels/reference.py",
        old="softcap * torch.tanh(scores / softcap)",
        new="scores.clamp(-softcap, softcap)",
        test=(
            "tests/unit/kernels/attention/test_rules.py::test_the_native_kernel_obeys_the_layer_s_rule_and_a_row_is_the_same_bits_alone"
        ),
    ),
    Mutant(
        name="sinks",
        claim="a head's sink takes its share of attention",
        file="twostroke/kernels/reference.py",
        old="return torch.cat((scores, last), dim=-1).softmax(dim=-1)[..., :-1]",
        new="return scores.softmax(dim=-1)",
        test=(
            "tests/unit/kernels/attention/test_rules.py::test_a_sink_takes_its_part_of_each_softmax_however_the_context_is_cut"
        ),
    ),
    Mutant(
        name="scales-of-pages",
        claim="quantised pages are read with the scale of each token and head",
        file="twostroke/kernels/pools/page_pool.py",
        old="* self.scales[pages, layer][..., None]",
        new="* self.scales[pages, layer][..., :1, None]",
        test=(
            "tests/unit/kernels/page_forms/test_page_forms.py::test_pages_hold_what_the_reference_writes_and_rows_come_out_as_it_computes_them"
        ),
    ),
    Mutant(
        name="key-centers",
        claim="keys are stored without their centers",
        file="twostroke/kernels/pools/page_pool.py",
        old="k = k.float() - self.key_centers[layer]",
        new="k = k.float() - self.key_centers[0]",
        test=(
            "tests/unit/models/page_forms/test_key_centers.py::test_each_layers_keys_are_stored_less_that_layers_own_centers"
        ),
    ),
    Mutant(
        name="nibbles-of-the-last-group",
        claim="values of 4 bits are scaled by groups of their own",
        file="twostroke/kernels/page_forms/nibble_pool.py",
        old="grouped[..., -1, VALUE_GROUP - spare :] = grouped[..., -1, :1]",
        new="grouped[..., -1, VALUE_GROUP - spare :] = 0",
        test=(
            "tests/unit/kernels/page_forms/test_nibbles.py::test_blocks_hold_what_torch_packs_and_rows_see_their_own_block_exact"
        ),
    ),
    Mutant(
        name="nibble-rounding",
        claim="4-bit numbers are the nearest ones",
        file="twostroke/kernels/page_forms/nibble_pool.py",
        old="return moved.clamp(0, 15).round().long(), scale, center",
        new="return moved.clamp(0, 15).long(), scale, center",
        test=(
            "tests/unit/kernels/page_forms/test_nibbles.py::test_blocks_hold_what_torch_packs_and_rows_see_their_own_block_exact"
        ),
    ),
    Mutant(
        name="rope-halves",
        claim="rope turns halves as the models were trained",
        file="twostroke/kernels/reference.py",
        old="return torch.cat((low * cosines - high * sines, high * cosines + low * sines), dim=-1).to(x.dtype)",
        new="return torch.cat((low * cosines + high * sines, high * cosines - low * sines), dim=-1).to(x.dtype)",
        test="tests/unit/models/test_families.py::test_logits_equal_transformers",
    ),
    Mutant(
        name="gptq-zeros",
        claim="the zero points of GPTQ files are one more than stored",
        file="twostroke/models/weights/stored/schemes.py",
        old='zero_bias=1 if version == "gptq" else 0',
        new="zero_bias=0",
        test="tests/unit/models/weights/stored/test_coded.py::test_a_format_is_served_as_it_is",
    ),
    Mutant(
        name="zeros-are-added",
        claim="zero points are subtracted",
        file="twostroke/kernels/products/stored.py",
        old="return scales, -numbers.mins.float() * scales",
        new="return scales, numbers.mins.float() * scales",
        test="tests/unit/models/weights/stored/test_coded.py::test_a_format_is_served_as_it_is",
    ),
    Mutant(
        name="mxfp4-exponents",
        claim="the scales of MXFP4 are powers of two from their bias",
        file="twostroke/kernels/products/stored.py",
        old="scales = torch.exp2(numbers.scales.float() - 128)",
        new="scales = torch.exp2(numbers.scales.float() - 127)",
        test=(
            "tests/unit/models/weights/stored/test_expert_blocks.py::test_tokens_are_those_of_transformers_with_the_same_numbers"
        ),
    ),
    Mutant(
        name="awq-order",
        claim="AWQ's codes lie in its own order",
        file="twostroke/models/weights/stored/coded.py",
        old="AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)",
        new="AWQ_ORDER: Final = (0, 1, 2, 3, 4, 5, 6, 7)",
        test="tests/unit/models/weights/stored/test_coded.py::test_a_format_is_served_as_it_is",
    ),
    Mutant(
        name="fp8-block-rows",
        claim="FP8 blocks have a scale for each block of rows",
        file="twostroke/models/weights/stored/coded.py",
        old="scales.repeat_interleave(scheme.block[0], dim=0)[: matrix.rows]",
        new="scales.repeat(scheme.block[0], 1)[: matrix.rows]",
        test="tests/unit/models/weights/stored/test_coded.py::test_a_format_is_served_as_it_is",
    ),
    Mutant(
        name="group-order",
        claim="columns of files with act-order keep their groups",
        file="twostroke/models/weights/stored/coded.py",
        old="return StoredNumbers(numbers.codes[:, order.long()], numbers.scales, numbers.mins, numbers.supers)",
        new="return numbers",
        test="tests/unit/models/weights/stored/test_coded.py::test_a_format_is_served_as_it_is",
    ),
    Mutant(
        name="experts-not-normalised",
        claim="the weights of a row's experts add up as the model says",
        file="twostroke/models/decoders/mixture.py",
        old="if spec.is_normalised:",
        new="if spec.is_normalised and spec.is_sigmoid:",
        test="tests/unit/models/decoders/test_mixture.py::test_normalised_weights_are_a_softmax_over_the_chosen_experts",
    ),
    Mutant(
        name="correction-in-weights",
        claim="a router's correction chooses experts and does not weigh them",
        file="twostroke/models/decoders/mixture.py",
        old="scores = logits.sigmoid() if spec.is_sigmoid else logits.softmax(dim=-1)",
        new="scores = scores_for_choice if spec.is_sigmoid else logits.softmax(dim=-1)",
        test=(
            "tests/unit/models/decoders/test_mixture.py::test_experts_lie_in_the_best_groups_and_a_correction_does_not_weigh"
        ),
    ),
    Mutant(
        name="rank-shares",
        claim="the ranks of a worker have all heads between them",
        file="twostroke/models/shares/share.py",
        old="return range(self.own.start * unit, self.own.stop * unit)",
        new="return range(0, len(self.own) * unit)",
        test="tests/unit/models/shares/test_share.py::test_ranks_have_the_logits_and_pages_of_one_that_computes_all",
    ),
    Mutant(
        name="ranks-share-kv-heads",
        claim="ranks that share heads have them all",
        file="twostroke/models/shares/share.py",
        old="kv_heads=max(1, spec.kv_heads // ranks),",
        new="kv_heads=spec.kv_heads,",
        test="tests/unit/models/shares/test_share.py::test_ranks_have_the_logits_and_pages_of_one_that_computes_all",
    ),
    Mutant(
        name="rows-of-other-adapters",
        claim="rows of others keep their bits",
        file="twostroke/models/adapters/products.py",
        old="y[rows, product.first : product.first + added.shape[1]] += added",
        new="y[:, product.first : product.first + added.shape[1]] += added.sum(0)",
        test=("tests/unit/models/adapters/test_products.py::test_in_float32_the_logits_are_those_of_merged_weights"),
    ),
    Mutant(
        name="adapter-scale",
        claim="an adapter answers as the model with merged weights",
        file="twostroke/models/adapters/products.py",
        old="b = torch.from_numpy(part.b) * adapter.scale",
        new="b = torch.from_numpy(part.b)",
        test=("tests/unit/models/adapters/test_products.py::test_in_float32_the_logits_are_those_of_merged_weights"),
    ),
    Mutant(
        name="adapter-of-another-digest",
        claim="no answer is that of an adapter's version which was not served",
        file="twostroke/models/adapters/store.py",
        old="if adapter.digest == digest:",
        new="if adapter.digest:",
        test=(
            "tests/unit/models/adapters/test_store.py::test_without_a_copy_the_folder_is_read_if_it_still_holds_the_adapter"
        ),
    ),
    Mutant(
        name="adapter-digest-without-scale",
        claim="adapters with the same digest compute the same",
        file="twostroke/models/adapters/peft.py",
        old="digest.update(scale.hex().encode())",
        new="pass",
        test="tests/unit/models/adapters/test_peft.py::test_the_digest_follows_what_is_computed_and_nothing_else",
    ),
    Mutant(
        name="adapter-digest-of-16-kib",
        claim="adapters with the same digest compute the same",
        file="twostroke/models/adapters/peft.py",
        old="digest.update(part)",
        new="digest.update(part[: 16 << 10])",
        test="tests/unit/models/adapters/test_peft.py::test_the_digest_sees_every_number_of_a_large_tensor",
    ),
    Mutant(
        name="adapter-freed-under-a-sequence",
        claim="an adapter stays as long as a sequence uses it",
        file="twostroke/worker/adapters/cache.py",
        old="if not known.holders and (known.was_held",
        new="if (known.was_held",
        test=(
            "tests/unit/worker/test_adapter_cache.py::test_where_all_are_in_use_a_sequence_waits_until_one_is_released"
        ),
    ),
    Mutant(
        name="lock-goes-first",
        claim="no two workers own a core",
        file="twostroke/engine/cores/cores.py",
        old="if file.name != LOCK:",
        new="if file.name:",
        test="tests/unit/engine/cores/test_cores.py::test_who_comes_while_the_last_one_leaves_has_its_core_alone",
    ),
    Mutant(
        name="adapter-dropped-before-forgotten",
        claim="no answer is that of an adapter which is not served",
        file="twostroke/worker/adapters/cache.py",
        old=(
            "        del self._loaded[digest]  # first: no sequence may begin with it while a step ends\n"
            "        await self._engine.between_steps(partial(self._slots.drop, digest))\n"
        ),
        new=(
            "        await self._engine.between_steps(partial(self._slots.drop, digest))\n"
            "        del self._loaded[digest]\n"
        ),
        test=(
            "tests/unit/worker/test_adapter_cache.py::test_no_sequence_begins_with_an_adapter_that_is_being_put_or_dropped"
        ),
    ),
    Mutant(
        name="own-lateness-is-a-ranks-silence",
        claim="a rank that does not freeze is not lost",
        file="twostroke/ranks/processes.py",
        old="self._look_for_beats(min(now_s - looked_s, 2 * BEAT_S))",
        new="self._look_for_beats(now_s - looked_s)",
        test=("tests/unit/ranks/test_processes.py::test_a_first_rank_that_was_stopped_itself_blames_nobody"),
    ),
)
