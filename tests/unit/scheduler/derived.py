"""What a scheduler keeps of its running sequences, derived from all of them: the oracle of `RunningSequences`."""

from __future__ import annotations

from twostroke.kv_cache.pool import BlockPool
from twostroke.scheduler.cost import Queued
from twostroke.scheduler.load import StepNeed
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Sequence


def check_kept(scheduler: Scheduler, pool: BlockPool, block_size: int) -> None:
    """Asserts that what is kept is what a look at every sequence and every block says."""
    load, running = scheduler.load, list(scheduler.running_sequences)
    queued, prompts = load.queued(), load.prompts
    assert queued == queued_of(scheduler, pool, block_size)
    assert prompts == scheduler.waiting + sum(len(each.known) <= each.prompt_tokens for each in running)
    kept = {need: list(scheduler._running.of(need)) for need in StepNeed}
    needs = {sequence: _need_of(scheduler, sequence, block_size) for sequence in running}
    assert kept == {need: [each for each in running if needs[each] is need] for need in StepNeed}
    waiting = list(scheduler.waiting_sequences)
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
            again = scheduler._progress.again_tokens(sequence)
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


def _need_of(scheduler: Scheduler, sequence: Sequence, size: int) -> StepNeed:
    progress, tokens = scheduler._progress, len(sequence.known) - sequence.next_start
    block = sequence.computed // size
    is_hashed = block < len(sequence.block_hashes)
    if is_hashed and progress.tells:
        assert not scheduler._pool.is_filled(sequence.pages[block]), "it has not passed over a block that is here"
    if tokens <= 1 and not is_hashed and sequence.sampling is not None:
        return StepNeed.STREAM
    if tokens <= 0 or (is_hashed and progress.is_blocked(sequence)):
        return StepNeed.NOTHING
    if tokens <= 1:
        return StepNeed.TOKEN
    return StepNeed.TAIL if tokens < size or sequence.computed == len(sequence.known) else StepNeed.PROMPT


def _is_due(scheduler: Scheduler, sequence: Sequence) -> bool:
    start, known = sequence.computed, len(sequence.known)
    return start < known <= sequence.prompt_tokens and scheduler._progress.runnable_end(sequence, start + 1) > start
