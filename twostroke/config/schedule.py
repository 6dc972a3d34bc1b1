"""Steps of each worker: how many sequences and tokens, and what waits."""

from __future__ import annotations

from twostroke.base.errors import ConfigError
from twostroke.config.model import NOT_EMPTY, PACED_PREFIX, ModelConfig
from twostroke.config.settings import Settings, setting

CPU_STEP_TOKENS = 128
"""Tokens of a step on a CPU: its matrix products are at their full rate from 32 rows on."""
GPU_STEP_TOKENS = 4096


SPECULATE_AUTO, SPECULATE_OFF = "auto", "off"
DRAFT_MODEL = "model"
"""The drafter that needs `--draft-model`."""
GRAMMAR_DRAFTER = "grammar"
"""The drafter that proposes what an answer's grammar forces."""
DRAFTER_NAMES = (GRAMMAR_DRAFTER, "lookup", "suffix", DRAFT_MODEL)
"""Keys of the table of drafters (`twostroke.speculation.drafters`)."""
REFUSED_HEADS = {"eagle3": "EAGLE-3 heads", "mtp": "MTP heads"}
"""Drafters that would need a head of a checkpoint, with the format of that head: they are refused."""
DRAFT_CACHE_BYTES = 128 << 20
"""Page memory of the draft model: about 10,000 tokens of a model of half a billion parameters."""


def check_draft_cache(draft_model: str | None, cache_bytes: int) -> None:
    """Raises ConfigError where a draft model's page memory is given without a draft model."""
    if draft_model is None and cache_bytes != DRAFT_CACHE_BYTES:
        raise ConfigError(
            "--draft-cache-memory would be ignored: it is for --draft-model", field="--draft-cache-memory"
        )


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
        choices=(SPECULATE_AUTO, SPECULATE_OFF, *DRAFTER_NAMES, *REFUSED_HEADS),
        help="who proposes tokens, several of which are checked in one step: grammar (what it forces where logprobs "
        "are asked for), lookup (what followed in the prompt), suffix (what followed in earlier answers of the same "
        "worker and salt), model (what --draft-model draws), off; auto: all, where no bit of an answer changes. eagle3 "
        "and mtp, heads of checkpoints, are refused: none is served",
    )
    draft_model: str | None = setting(
        None,
        **NOT_EMPTY,
        unit="MODEL",
        help="a smaller model with the same tokens, named as --model is, that proposes tokens on decode workers",
        default_text="none",
    )
    draft_cache_bytes: int = setting(
        DRAFT_CACHE_BYTES,
        flag="--draft-cache-memory",
        least=1,
        is_size=True,
        unit="SIZE",
        help="page memory of the draft model on each decode worker: 64M, 1G",
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

    def check(self, model: ModelConfig) -> None:
        """Raises ConfigError where streams would use up a step, or the draft model does not go with `model`."""
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be more than "
                f"--max-num-seqs ({self.max_num_seqs})",
                field="--max-num-batched-tokens",
            )
        self.check_draft_model(model)

    def check_draft_model(self, model: ModelConfig) -> None:
        """Raises ConfigError where the draft model cannot propose tokens for `model`, as far as their names say it."""
        if self.speculate in REFUSED_HEADS:
            refused = f"--speculate {self.speculate}: {REFUSED_HEADS[self.speculate]} are not served"
            raise ConfigError(refused, field="--speculate")
        name = self.draft_model
        check_draft_cache(name, self.draft_cache_bytes)
        if name is None:
            if self.speculate == DRAFT_MODEL:
                raise ConfigError("--speculate model needs --draft-model: the model that proposes", field="--speculate")
            return
        if self.speculate not in (SPECULATE_AUTO, DRAFT_MODEL):
            raise ConfigError(
                f"--draft-model {name} would propose nothing with --speculate {self.speculate}: "
                f"give --speculate {SPECULATE_AUTO} or {DRAFT_MODEL}",
                field="--draft-model",
            )
        if model.is_paced or name.startswith(PACED_PREFIX):
            raise ConfigError(
                f"--draft-model {name}: a paced model computes nothing, so neither it nor its draft model can be one",
                field="--draft-model",
            )
        if model.device.startswith("cuda"):
            raise ConfigError(
                f"--draft-model {name} is computed on CPUs only, and --device is {model.device}", field="--draft-model"
            )
        if name == model.model:
            raise ConfigError(
                f"--draft-model {name} is the model itself: a draft model is a smaller one", field="--draft-model"
            )
