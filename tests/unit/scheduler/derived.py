"""What a scheduler keeps of its running sequences, derived from all of them: the oracle of `RunningSequences`."""

from __future__ import annotations

from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.cost import Queued
from twostroke.scheduler.running import StepNeed
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Sequence


def check_kept(scheduler: Scheduler, pool: BlockPool, block_size: int) -> None:
    """Asserts that what is kept is what a look at every sequence and every block says."""
    load, running = scheduler.load, list(scheduler.running_sequences)
    queued, prompts = load.queued(), load.prompts
    assert queued == queued_of(scheduler, pool, block_size)
    assert prompts == scheduler.waiting + sum(len(each.known) <= each.prompt_tokens for each in running)
    kept = {need: list(scheduler._running.with_need(need)) for need in StepNeed}
    found = kept[StepNeed.NOTHING]  # others may have begun to write what a sequence is still to be chosen for
    needs = {each: _need_of(scheduler, each, block_size, may_be_blocked=each in found) for each in running}
    assert kept == {need: [each for each in running if needs[each] is need] for need in StepNeed}
    waiting = list(scheduler.waiting_sequences)
    for sequence in waiting:
        if pool.gains < sequence.claimable_at:
            assert pool.shortage(sequence.block_hashes, _private_blocks(sequence, block_size)) is None, "it would fit"
    due = [
        each
        for need in (StepNeed.TOKEN, StepNeed.TAIL, StepNeed.PROMPT)
        for each in kept[need]
        if _is_due(scheduler, each)
    ]
    assert [prompt.tokens for prompt in load.due_prompts()] == [
        *(len(each.known) - each.computed for each in due),
        *(each.pending_tokens for each in waiting[:16]),
    ]


def _private_blocks(sequence: Sequence, size: int) -> int:
    wanted = len(sequence.known) + (sequence.sampling is not None)
    return -(-wanted // size) - len(sequence.block_hashes)


def check_caught_up(scheduler: Scheduler, size: int) -> None:
    """Asserts that no sequence has a readable block before it, where it may pass over each."""
    for sequence in scheduler.running_sequences if scheduler._progress.pages_tell_all else ():
        block = sequence.computed // size
        if block < len(sequence.block_hashes):
            assert not scheduler._pool.is_filled(sequence.pages[block]), "it has not passed over a block that is here"


def queued_of(scheduler: Scheduler, pool: BlockPool, size: int) -> Queued:
    waiting, unwritten = list(scheduler.waiting_sequences), pool.unwritten
    tokens = sum(each.pending_tokens for each in waiting) + unwritten.blocks * size
    pairs = sum(each.pending_pairs for each in waiting)
    pairs += (unwritten.depths + unwritten.blocks / 2) * size**2
    streams = stream_tokens = context_tokens = 0
    for sequence in scheduler.running_sequences:
        known, computed, hashed = len(sequence.known), sequence.computed, len(sequence.block_hashes) * size
        begun, tail = 0, known - computed
        if computed < hashed:
            again = scheduler._progress.recomputed_tokens(sequence)
            begun, tail = _begun_tokens(pool, sequence, size) + again, known - hashed
        if known - computed <= 1:
            streams += 1
            stream_tokens += begun + tail
            context_tokens += known
        else:
            tokens += begun + tail
            pairs += begun * (computed + begun / 2) + tail * (known - tail / 2)
    return Queued(tokens, pairs, streams, context_tokens, stream_tokens)


def _begun_tokens(pool: BlockPool, sequence: Sequence, size: int) -> int:
    block = sequence.computed // size
    while block < len(sequence.block_hashes) and pool.writer(sequence.pages[block]) == sequence.session:
        block += 1
    return max(0, block * size - sequence.computed)


def _need_of(scheduler: Scheduler, sequence: Sequence, size: int, *, may_be_blocked: bool) -> StepNeed:
    progress, tokens = scheduler._progress, len(sequence.known) - sequence.next_start
    is_hashed = sequence.computed // size < len(sequence.block_hashes)
    if tokens <= 1 and not is_hashed and sequence.sampling is not None:
        return StepNeed.STREAM
    if tokens <= 0 or (may_be_blocked and is_hashed and progress.is_blocked(sequence)):
        return StepNeed.NOTHING
    if tokens <= 1:
        return StepNeed.TOKEN
    return StepNeed.TAIL if tokens < size or sequence.computed == len(sequence.known) else StepNeed.PROMPT


def _is_due(scheduler: Scheduler, sequence: Sequence) -> bool:
    start, known = sequence.computed, len(sequence.known)
    return start < known <= sequence.prompt_tokens and scheduler._progress.runnable_end(sequence, start + 1) > start
