"""Steps of each worker: how many sequences and tokens, and what waits."""

from __future__ import annotations

from twostroke.config.settings import Settings, setting
from twostroke.errors import ConfigError

CPU_STEP_TOKENS = 128
"""Matrix products of a CPU are at their full rate from 32 rows on."""
GPU_STEP_TOKENS = 4096


SPECULATE_AUTO, SPECULATE_OFF = "auto", "off"
DRAFTER_NAMES = ("lookup", "suffix")
"""Keys of the table of drafters (`twostroke.speculation.drafters`)."""


class ScheduleConfig(Settings):
    max_num_seqs: int = setting(64, least=1, help="most sequences that hold pages at once on one worker")
    max_num_batched_tokens: int | None = setting(
        None,
        least=1,
        help="most tokens in one step",
        default_text=f"{CPU_STEP_TOKENS} to 512 on CPUs, by what they cost there; {GPU_STEP_TOKENS} on GPUs; "
        "at least twice --max-num-seqs",
    )
    step_target_ms: float | None = setting(
        None,
        above=0,
        unit="MS",
        help="target length of a step in which streams run while prompts wait; it bounds the prompt tokens that run "
        "beside them",
        default_text="on CPUs at most 5 times the step of a lone stream, and less beside many; else 40",
    )
    max_waiting: int = setting(
        1024, is_hidden=True, least=1, help="requests or pulls that may wait without pages; one more is refused"
    )
    max_passes: int = setting(
        4, is_hidden=True, least=0, help="how often shorter pulls may start before a longer one that does not fit yet"
    )
    speculate: str = setting(
        SPECULATE_AUTO,
        choices=(SPECULATE_AUTO, SPECULATE_OFF, *DRAFTER_NAMES),
        help="who proposes tokens, several of which are checked in one step: lookup (what followed in the prompt), "
        "suffix (what followed in earlier answers of the tenant), off; auto: all, where no bit of an answer changes",
    )
    local_prefill: bool = setting(
        True, help="decode workers with room compute prompts that would wait at a prefill worker"
    )

    @property
    def step_target_s(self) -> float | None:
        return None if self.step_target_ms is None else self.step_target_ms / 1e3

    def step_tokens(self, *, on_gpu: bool = False) -> int:
        """Tokens in one step, unless costs allow more: short prompts are done soon, and weights are read seldom."""
        usual = GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS
        return self.max_num_batched_tokens or max(usual, 2 * self.max_num_seqs)

    def check_budget(self) -> None:
        """Raises ConfigError where one token for each sequence would use up a step, so that no prompt ever ran."""
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be more than "
                f"--max-num-seqs ({self.max_num_seqs})",
                field="--max-num-batched-tokens",
            )
