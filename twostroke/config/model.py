"""What is served, and on what device."""

from __future__ import annotations

from typing import Any, Final

from twostroke.base.errors import ConfigError
from twostroke.config.settings import Settings, setting

DEFAULT_MODEL = "smollm2-135m"
PACED_PREFIX = "paced:"
AUTO, TRANSFORMERS = "auto", "transformers"
MOST_RANKS = 64
"""Ranks of a worker: processes of one host."""
IMPLEMENTATIONS = (AUTO, "twostroke", TRANSFORMERS)
"""What --model-impl takes: the owner of the code that computes a model."""
NOT_EMPTY: Final[dict[str, Any]] = {"pattern": r"(?s).+", "must": "the name of a model"}
"""What a setting says that names a model: an empty path is the current folder."""


class ModelConfig(Settings):
    model: str = setting(
        DEFAULT_MODEL,
        **NOT_EMPTY,
        help="a name of the catalogue (NAME:gguf: its file as it is), a directory, a GGUF file, a hub id or paced:SPEC",
    )
    served_model_name: str | None = setting(None, unit="NAME", help="what clients call it", default_text="as --model")
    dtype: str = setting(
        "bfloat16", choices=("bfloat16", "float16", "float32"), help="number format of weights and activations"
    )
    weights: str = setting(
        "model",
        choices=("model", "int8"),
        help="weights as the model has them, or rounded to int8: faster on CPUs, less exact",
    )
    max_model_len: int | None = setting(
        None,
        least=1,
        unit="TOKENS",
        help="most tokens of prompt and answer together",
        default_text="what the model was made for",
    )
    model_impl: str = setting(
        "auto",
        choices=IMPLEMENTATIONS,
        help="whose code computes the model; auto: ours where we have its family, else that of transformers",
    )
    deterministic: bool = setting(
        False, help="a stream's tokens depend on no other stream, whatever dies; refused where that cannot be kept"
    )
    """The result of a row depends neither on the other rows of a step nor on how its prompt is cut. On a CPU with a
    compiler, bfloat16 keeps that anyway. Elsewhere it costs time, and on CUDA it is refused."""
    device: str = setting(
        "auto",
        pattern=r"auto|cpu|cuda(:\d+)?",
        must="auto, cpu, cuda or cuda:N",
        help="device that computes; auto: CUDA where there is a device, else the CPU",
    )

    tp: int = setting(
        1,
        least=1,
        most=MOST_RANKS,
        unit="RANKS",
        help="processes of each worker, all on one host, that share out the heads, MLPs, experts and vocabulary of the "
        "model (tensor parallelism); each has its own --threads",
    )
    prefill_tp: int | None = setting(
        None,
        least=1,
        most=MOST_RANKS,
        unit="RANKS",
        help="--tp of prefill workers; where decode workers have another, pages are regrouped on the way",
        default_text="as --tp",
    )
    decode_tp: int | None = setting(
        None, least=1, most=MOST_RANKS, unit="RANKS", help="--tp of decode workers", default_text="as --tp"
    )

    def model_post_init(self, _context: Any) -> None:
        if self.weights == "int8" and self.dtype != "bfloat16":
            raise ConfigError(f"--weights int8 needs --dtype bfloat16, got {self.dtype}", field="--weights")
        for flag, ranks in self.ranks_by_flag:
            self._check_ranks(flag, ranks)
        if self.names_gpu:
            self.check_on_gpu()

    @property
    def ranks_by_flag(self) -> tuple[tuple[str, int], ...]:
        """Returns every number of ranks that some workers have, with the flag that sets it."""
        found = (("--tp", self.tp), ("--prefill-tp", self.prefill_tp), ("--decode-tp", self.decode_tp))
        return tuple([(flag, ranks) for flag, ranks in found if ranks is not None and ranks > 1])

    def _check_ranks(self, flag: str, ranks: int) -> None:
        why = ""
        if self.is_paced:
            why = "a paced model computes nothing that ranks could share out"
        elif self.model_impl == TRANSFORMERS:
            why = "--model-impl transformers computes whole models only"
        if why:
            raise ConfigError(f"{flag} {ranks}: {why}", field=flag)

    @property
    def names_gpu(self) -> bool:
        """Whether --device leaves no choice but GPUs, which paced models have no use for."""
        return self.device.startswith("cuda") and not self.is_paced

    def check_on_gpu(self) -> None:
        """Raises ConfigError for what no GPU computes."""
        if self.weights == "int8":
            raise ConfigError("--weights int8 is for CPUs: use --device cpu, or --weights model", field="--weights")
        if self.deterministic:
            raise ConfigError(
                "--deterministic cannot be kept on CUDA: its matrix products pick their order of summation by the "
                "number of rows in a step; use --device cpu, or leave --deterministic away",
                field="--deterministic",
            )

    @property
    def public_name(self) -> str:
        return self.served_model_name or self.model

    @property
    def is_paced(self) -> bool:
        return self.model.startswith(PACED_PREFIX)
