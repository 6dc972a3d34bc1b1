"""Pages and where they lie: their bytes and names, who holds them, and the tiers below the pool."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        name="digest-of-16-kib",
        claim="a damaged page is never used: its digest sees all of its bytes",
        file="twostroke/transfer/base.py",
        old="return xxhash.xxh3_64_digest(page.data if isinstance(page, np.ndarray) else page)",
        new=(
            "return xxhash.xxh3_64_digest(memoryview(page.data if isinstance(page, np.ndarray) else "
            'page).cast("B")[:16384])'
        ),
        test="tests/unit/transfer/test_digest.py::test_a_changed_byte_changes_the_digest_wherever_it_lies",
    ),
    Mutant(
        name="digest-not-compared",
        claim="a damaged page is computed locally",
        file="twostroke/worker/pulls/pull_client.py",
        old="if announced == arrived:",
        new="if len(announced) == len(arrived):",
        test="tests/unit/worker/pulls/test_pull_client.py::test_a_transfer_that_fails_ends_in_local_computation",
    ),
    Mutant(
        name="no-fence",
        claim="a page is not given away while a transfer may still write to it",
        file="twostroke/worker/pulls/pull_client.py",
        old="await fence_for_good(transport, transfer)",
        new="pass",
        test=(
            "tests/unit/worker/pulls/test_quarantine.py::test_pages_stay_quarantined_until_the_fence_stands_however_often_the_pull_is_stopped"
        ),
    ),
    Mutant(
        name="digest-of-another-generation",
        claim="a page that was given to another block is announced with its own digest",
        file="twostroke/worker/pull_ends.py",
        old="if known is None or known[0] != generation",
        new="if known is None",
        test=(
            "tests/unit/worker/test_page_digests.py::test_a_page_that_got_a_new_writer_is_announced_with_the_digest_of_its_new_content"
        ),
    ),
    Mutant(
        name="shm-generation-not-checked-after",
        claim="a page that was reused while somebody read it is never taken for what it was",
        file="twostroke/transfer/same_host/shm.py",
        old="refuse_changed(copy, self._remote.generation(page), after=True)",
        new="pass",
        test=("tests/unit/transfer/test_conformance.py::test_a_page_that_is_reused_while_it_is_copied_fails_the_pull"),
    ),
    Mutant(
        name="tcp-generation-not-checked",
        claim="a page that was reused while somebody read it is never taken for what it was",
        file="twostroke/transfer/network/requests.py",
        old="wrong = np.flatnonzero(actual != expected)",
        new="wrong = np.flatnonzero(actual < expected)",
        test="tests/unit/transfer/test_tcp.py::test_a_page_that_is_reused_while_it_is_sent_is_reported",
    ),
    Mutant(
        name="tcp-sent-pages-not-checked",
        claim="a page that was reused while somebody read it is never taken for what it was",
        file="twostroke/transfer/network/tcp.py",
        old="if reason := request.changed(sent_from, stop, memory):",
        new="if reason := request.changed(start, stop, memory):",
        test="tests/unit/transfer/test_tcp.py::test_a_page_that_is_reused_while_it_is_sent_is_reported",
    ),
    Mutant(
        name="pull-of-4096-pages",
        claim="a pull brings all of its pages, however many there are",
        file="twostroke/transfer/network/connection.py",
        old="for start in range(0, len(pull.copies), MAX_PAGES):",
        new="for start in range(0, min(len(pull.copies), MAX_PAGES), MAX_PAGES):",
        test=("tests/unit/transfer/test_tcp.py::test_a_pull_of_more_pages_than_one_request_may_have_brings_them_all"),
    ),
    Mutant(
        name="partly-sent",
        claim="a transfer that the socket takes in parts brings the same bytes",
        file="twostroke/transfer/sockets/frames.py",
        old="views[first] = views[first][moved:]",
        new="views[first] = views[first][:]",
        test="tests/unit/transfer/test_tcp.py::test_a_page_that_is_reused_while_it_is_sent_is_reported",
    ),
    Mutant(
        name="local-page-out-of-bounds",
        claim="no transfer writes outside of the pool",
        file="twostroke/transfer/pulls.py",
        old="if not 0 <= copy.local < local_pages:",
        new="if not 0 <= copy.local <= local_pages:",
        test=("tests/unit/transfer/test_conformance.py::test_pages_out_of_bounds_are_refused_before_anything_moves"),
    ),
    Mutant(
        name="remote-page-out-of-bounds",
        claim="garbage at a page port reads nothing outside of the pool",
        file="twostroke/transfer/network/requests.py",
        old="int(pages.max()) >= limit",
        new="int(pages.max()) > limit",
        test="tests/unit/transfer/test_tcp.py::test_a_request_out_of_bounds_ends_the_connection_without_a_page",
    ),
    Mutant(
        name="reader-of-an-earlier-epoch",
        claim="stale epochs are refused everywhere",
        file="twostroke/transfer/sockets/handshake.py",
        old="if epoch.incarnation < newest:",
        new="if epoch.incarnation + 1000 < newest:",
        test=("tests/unit/transfer/test_conformance.py::test_an_earlier_life_of_a_reader_is_refused_after_a_later_one"),
    ),
    Mutant(
        name="owner-of-another-epoch",
        claim="stale epochs are refused everywhere",
        file="twostroke/transfer/sockets/handshake.py",
        old="if _epoch(meant) != me.epoch:",
        new="if _epoch(meant) > me.epoch:",
        test="tests/unit/transfer/test_tcp.py::test_a_refusal_is_typed_counted_and_ends_the_connection",
    ),
    Mutant(
        name="hash-without-parent",
        claim="a block hash stands for every token up to its end",
        file="twostroke/kv_cache/block.py",
        old="        state.update(parent)\n",
        new="",
        test="tests/unit/kv_cache/test_block.py::test_names_never_change_from_one_release_to_the_next",
    ),
    Mutant(
        name="hash-of-16-bit-tokens",
        claim="a block hash stands for every token up to its end",
        file="twostroke/kv_cache/block.py",
        old='packed = array("I", tokens)',
        new='packed = array("I", [token % (1 << 16) for token in tokens])',
        test="tests/unit/kv_cache/test_block.py::test_names_never_change_from_one_release_to_the_next",
    ),
    Mutant(
        name="salt-not-framed",
        claim="tenants do not see each other's prefixes, whatever salt they choose",
        file="twostroke/kv_cache/block.py",
        old="return _hash(_framed(tenant.encode()) + _framed(cache_salt), _OWNER)",
        new="return _hash(tenant.encode() + cache_salt, _OWNER)",
        test="tests/unit/kv_cache/test_block.py::test_names_never_change_from_one_release_to_the_next",
    ),
    Mutant(
        name="salt-of-the-client-alone",
        claim="tenants do not see each other's prefixes",
        file="twostroke/kv_cache/block.py",
        old="return _hash(_framed(tenant.encode()) + _framed(cache_salt), _OWNER)",
        new="return _hash(_framed(cache_salt or tenant.encode()), _OWNER)",
        test="tests/unit/kv_cache/test_block.py::test_names_never_change_from_one_release_to_the_next",
    ),
    Mutant(
        name="adapter-salt-without-tenant",
        claim="tenants do not see each other's prefixes, also with an adapter",
        file="twostroke/kv_cache/block.py",
        old="return _hash(_framed(salt) + _framed(content), kind)",
        new="return _hash(_framed(content), kind)",
        test=("tests/unit/router/requests/test_isolations.py::test_a_salt_depends_on_every_part_that_it_is_made_of"),
    ),
    Mutant(
        name="adapter-salt-without-adapter",
        claim="no answer is that of another adapter",
        file="twostroke/kv_cache/block.py",
        old="return _hash(_framed(salt) + _framed(content), kind)",
        new="return _hash(_framed(salt), kind)",
        test=("tests/unit/router/requests/test_isolations.py::test_a_salt_depends_on_every_part_that_it_is_made_of"),
    ),
    Mutant(
        name="exact-salt-without-tenant",
        claim="tenants do not see each other's prefixes, also where pages must be exact",
        file="twostroke/kv_cache/block.py",
        old="return _hash(_framed(salt), _EXACT)",
        new='return _hash(_framed(b""), _EXACT)',
        test=("tests/unit/router/requests/test_isolations.py::test_a_salt_depends_on_every_part_that_it_is_made_of"),
    ),
    Mutant(
        name="public-blocks-of-adapters",
        claim="blocks that an adapter computes are never public",
        file="router/requests/client_request.py",
        old="is_apart = is_exact or named is not None",
        new="is_apart = is_exact",
        test=(
            "tests/unit/router/requests/test_isolations.py::test_public_blocks_are_public_for_the_model_alone_and_never_where_pages_must_be_exact"
        ),
    ),
    Mutant(
        name="public-block-that-is-not-whole",
        claim="what is behind a public prefix is not public",
        file="router/text/prompts.py",
        old="default=0) // block_size",
        new="default=0) // block_size + 1",
        test=(
            "tests/unit/router/requests/test_tenants.py::test_blocks_wholly_in_what_a_prompt_shares_with_a_public_prefix_are_public"
        ),
    ),
    Mutant(
        name="count-of-pages",
        claim="the pages of all states add up to the pool",
        file="twostroke/kv_cache/groups/group_pool.py",
        old="self._counts[record.state] -= 1",
        new="self._counts[record.state] -= record.state is not PageState.QUARANTINED",
        test=(
            "tests/unit/kv_cache/test_pool.py::test_an_unwanted_page_stays_quarantined_until_its_writer_is_known_to_be_finished"
        ),
    ),
    Mutant(
        name="quarantine-ends-at-once",
        claim="a page is not given away while a transfer may still write to it",
        file="twostroke/kv_cache/groups/group_pool.py",
        old="self._move(page, PageState.QUARANTINED)",
        new="self._forget(page)",
        test=(
            "tests/unit/kv_cache/test_pool.py::test_an_unwanted_page_stays_quarantined_until_its_writer_is_known_to_be_finished"
        ),
    ),
    Mutant(
        name="pinned-blocks-are-evicted",
        claim="a pinned prefix outlives floods",
        file="twostroke/kv_cache/groups/full_group.py",
        old="record.state = state = PageState.PINNED if record.hash in self._pins else PageState.CACHED",
        new="record.state = state = PageState.CACHED",
        test=(
            "tests/unit/kv_cache/test_pool.py::test_a_pinned_block_is_used_as_any_other_and_is_pinned_again_afterwards"
        ),
    ),
    Mutant(
        name="parents-stay-for-ever",
        claim="every cached block can be evicted",
        file="twostroke/kv_cache/groups/full_group.py",
        old=("        if above is not None:\n            self._offer(above)"),
        new="        del above",
        test="tests/unit/kv_cache/test_pool.py::test_a_pinned_block_is_not_evicted_and_is_no_room_for_a_claim",
    ),
    Mutant(
        name="no-new-generation",
        claim="a page that was reused while somebody read it is never taken for what it was",
        file="twostroke/kv_cache/groups/group_pool.py",
        old="        self._listener.new_writers(taken)\n",
        new="",
        test="tests/unit/kv_cache/test_pool.py::test_every_new_life_of_a_page_is_told_and_a_shared_one_is_not",
    ),
    Mutant(
        name="window-parts-of-one-block-less",
        claim="the router and the worker agree after which block a window model can go on",
        file="twostroke/kv_cache/windows/shape.py",
        old="depth - block <= tail_blocks",
        new="depth - block < tail_blocks",
        test="tests/unit/kv_cache/windows/test_window_parts.py::test_the_deepest_hit_is_found_as_by_trying_all_depths",
    ),
    Mutant(
        name="room-of-window-slots",
        claim="nobody waits forever for window slots",
        file="twostroke/kv_cache/windows/window_group.py",
        old="return self.committed + kept + slots <= self.shape.slots",
        new="return self.committed + slots <= self.shape.slots",
        test=(
            "tests/unit/kv_cache/windows/test_window_parts.py::test_a_pin_keeps_the_window_parts_of_its_last_blocks_alone"
        ),
    ),
    Mutant(
        name="converted-passes-for-computed",
        claim="pages that were converted never pass for ones that were computed",
        file="twostroke/kv_cache/form.py",
        old='return self.format if self.converted_from is None else f"{self.format} from {self.converted_from}"',
        new="return self.format",
        test=(
            "tests/unit/kv_cache/test_form.py::test_pages_that_may_have_been_converted_never_pass_for_pages_that_were_computed"
        ),
    ),
    Mutant(
        name="pages-of-any-form",
        claim="pages of another form are never used",
        file="twostroke/kv_cache/form.py",
        old="return other in (self, self.source)",
        new="return True",
        test=(
            "tests/unit/kv_cache/test_form.py::test_pages_become_those_of_a_worker_as_they_are_or_from_the_form_that_it_converts_and_no_other"
        ),
    ),
    Mutant(
        name="cap-of-a-tenants-hints",
        claim="the hints of one tenant keep no more than its share",
        file="twostroke/kv_cache/pins/pin_table.py",
        old="if len(hinted) + new > self.limits.tenant:",
        new="if new > self.limits.tenant:",
        test="tests/unit/kv_cache/test_pins.py::test_the_hints_of_one_tenant_keep_no_more_blocks_together_than_its_share",
    ),
    Mutant(
        name="pins-leave-no-room",
        claim="pins leave room for the longest request",
        file="twostroke/kv_cache/pins/pin_table.py",
        old="return max(0, min(self.share, self.total - self.longest_request))",
        new="return self.share",
        test="tests/unit/kv_cache/test_pins.py::test_the_cap_is_the_share_or_what_the_longest_request_leaves",
    ),
    Mutant(
        name="pins-never-end",
        claim="a pin ends when its time is over",
        file="twostroke/kv_cache/pins/pin_table.py",
        old="return self.expires_s is not None and self.expires_s <= now_s",
        new="return False",
        test="tests/unit/kv_cache/test_pins.py::TestPinHistory::runTest",
    ),
    Mutant(
        name="record-with-a-damaged-header",
        claim="whatever a crash leaves of a segment, only whole and right pages are found",
        file="twostroke/kv_cache/tiers/record.py",
        old=(
            "if len(packed) < _HEADER.size or xxhash.xxh3_64_digest(packed) != bytes(data[_HEADER.size : "
            "HEADER_BYTES]):"
        ),
        new="if len(packed) < _HEADER.size:",
        test="tests/unit/kv_cache/tiers/test_records.py::test_a_flipped_bit_anywhere_never_gives_other_bytes",
    ),
    Mutant(
        name="record-of-another-model",
        claim="a record of another model, form or version is never used",
        file="twostroke/kv_cache/tiers/record.py",
        old="if (magic, version, identity, page_bytes) != (_MAGIC, VERSION, self.identity, self.page_bytes):",
        new="if (magic, version, page_bytes) != (_MAGIC, VERSION, self.page_bytes):",
        test="tests/unit/kv_cache/tiers/test_records.py::test_a_record_of_another_model_or_form_is_never_used",
    ),
    Mutant(
        name="record-of-another-version",
        claim="a record of another model, form or version is never used",
        file="twostroke/kv_cache/tiers/record.py",
        old="if (magic, version, identity, page_bytes) != (_MAGIC, VERSION, self.identity, self.page_bytes):",
        new="if (magic, identity, page_bytes) != (_MAGIC, self.identity, self.page_bytes):",
        test="tests/unit/kv_cache/tiers/test_records.py::test_a_record_of_another_version_is_never_used",
    ),
    Mutant(
        name="host-page-not-verified",
        claim="pages come back from host memory as they were",
        file="twostroke/worker/tiers/host_tier.py",
        old="if digest(data) != read.place.digest:",
        new="if len(data) != self._memory.page_bytes:",
        test=(
            "tests/unit/worker/tiers/test_host.py::test_a_page_that_changed_in_host_memory_is_a_counted_miss_and_never_reaches_the_disk"
        ),
    ),
    Mutant(
        name="eviction-copy-of-another-block",
        claim="a copy of a page that was given away meanwhile is dropped",
        file="twostroke/worker/tiers/copies/eviction_copies.py",
        old="digests.append(known if memory.generation(copy.page) == copy.generation else None)",
        new="digests.append(known)",
        test=(
            "tests/unit/worker/tiers/test_eviction_copies.py::test_a_copy_of_a_page_that_was_given_away_before_it_or_during_it_counts_for_nothing"
        ),
    ),
    Mutant(
        name="host-page-freed-under-a-reader",
        claim="a page of host memory is not overwritten while it is read",
        file="twostroke/kv_cache/tiers/host_store.py",
        old=("if entry is not None and not entry.holds:\n            self._free.append(entry.page)"),
        new=("if entry is not None:\n            self._free.append(entry.page)"),
        test=("tests/unit/kv_cache/tiers/test_host_store.py::test_a_page_that_is_being_copied_from_is_not_given_away"),
    ),
    Mutant(
        name="first-sight-budget",
        claim="pages that were seen once spend a small share of the disk's budget",
        file="twostroke/kv_cache/tiers/byte_budget.py",
        old="self._first_sight = ByteBudget(FIRST_SIGHT_SHARE * bytes_per_s, page_bytes)",
        new="self._first_sight = ByteBudget(bytes_per_s, page_bytes)",
        test=(
            "tests/unit/kv_cache/tiers/test_byte_budget.py::test_pages_that_were_seen_once_have_a_share_of_their_own"
        ),
    ),
    Mutant(
        name="segment-with-a-writer-goes",
        claim="a segment stays as long as something is being written to it",
        file="twostroke/kv_cache/tiers/disk_store.py",
        old="written = [each for each in self._segments.values() if not each.reserved]",
        new="written = list(self._segments.values())",
        test="tests/unit/kv_cache/tiers/test_disk_store.py::test_what_is_being_written_is_never_reclaimed",
    ),
    Mutant(
        name="loads-whatever-they-cost",
        claim="a disk that is slower than computing or pulling holds up nobody",
        file="twostroke/worker/tiers/loads/prices.py",
        old="if pays(self.load_s(tier, len(held)), price.other_s):",
        new="if price.other_s > 0:",
        test=(
            "tests/unit/worker/tiers/test_race.py::test_what_the_source_has_is_pulled_where_the_disk_is_slower_than_the_link"
        ),
    ),
    Mutant(
        name="late-loads-go-on",
        claim="a disk that never answers holds up nobody",
        file="twostroke/worker/tiers/loads/running.py",
        old="if is_late(elapsed_s, load.wait_s, load.arrived, wanted, load.price.other_s):",
        new="if is_late(0.0, load.wait_s, load.arrived, wanted, load.price.other_s):",
        test=(
            "tests/unit/worker/tiers/test_race.py::test_a_load_that_becomes_slow_is_given_up_and_its_blocks_are_pulled"
        ),
    ),
    Mutant(
        name="first-epoch-is-the-fence",
        claim="an earlier epoch of a worker reads no pages",
        file="twostroke/transfer/sockets/handshake.py",
        old="            self._incarnations[worker_id] = epoch.incarnation\n",
        new="",
        test=("tests/unit/transfer/test_conformance.py::test_an_earlier_life_of_a_reader_is_refused_after_a_later_one"),
    ),
    Mutant(
        name="fetching-for-nobody",
        claim="what nobody wants any more is fetched no further",
        file="prefill_worker/jobs.py",
        old=(
            "        self._host.scheduler.end(self.sequence)\n"
            "        self._host.pulls.prune()\n"
            "        self._host.loop.wake()\n"
            "        self._on_close"
        ),
        new="        self._host.scheduler.end(self.sequence)\n        self._host.loop.wake()\n        self._on_close",
        test=("tests/unit/worker/supply/test_peer_pulls.py::test_a_source_that_nobody_asks_any_more_stops_fetching"),
    ),
    Mutant(
        name="left-out-pages-land",
        claim="one load serves all who wait, and writes to no page that is computed meanwhile",
        file="twostroke/worker/tiers/reader.py",
        old="if self._is_given_up or self.is_left_out(read):",
        new="if self._is_given_up:",
        test=(
            "tests/unit/worker/tiers/test_reader.py::test_what_is_left_out_of_a_job_lands_no_more_also_while_it_is_read"
        ),
    ),
    Mutant(
        name="pulls-of-removed-pins-go-on",
        claim="a pin that is removed holds nothing",
        file="twostroke/worker/pins/keeper.py",
        old=("        self._host.scheduler.end(sequence)\n        self._host.pulls.prune()\n"),
        new="        self._host.scheduler.end(sequence)\n",
        test=(
            "tests/unit/worker/pins/test_pins.py::test_a_pin_that_is_removed_while_its_source_sends_it_is_pulled_no_further"
        ),
    ),
    Mutant(
        name="whole-pulls-are-abandoned",
        claim="answers say how many tokens were cached",
        file="twostroke/worker/supply/open_pull.py",
        old="        if not self.remaining:\n            return False\n",
        new="        if not self.remaining:\n            return True\n",
        test=(
            "tests/unit/worker/pulls/test_pull_client.py::test_a_pull_that_has_brought_all_is_reported_although_another_request_ends_before_its_task"
        ),
    ),
)
