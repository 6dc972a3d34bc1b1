"""Metadata of the server and its models in KServe's protocol: their tensors, and that models are decoupled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.dialects.kserve.fields import ASKED_OUTPUTS
from router.dialects.kserve.schema import FINISH_REASON, TEXT_OUTPUT, VERSION
from router.dialects.reply import Json
from twostroke import __version__

PLATFORM = "twostroke"
EXTENSIONS = ("binary_tensor_data", "generate", "model_configuration", "parameters")
"""Triton's extensions of the protocol that this server has."""

CONFIG_TYPES = {"BYTES": "TYPE_STRING", "BOOL": "TYPE_BOOL", "UINT32": "TYPE_UINT32", "FP32": "TYPE_FP32"}
"""Names of datatypes in a model's configuration, by their names in requests."""


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    datatype: str
    length: int = 1
    """Number of values. -1: one for each choice."""

    @property
    def description(self) -> Json:
        return {"name": self.name, "datatype": self.datatype, "shape": [self.length]}


INPUTS = (
    Tensor("text_input", "BYTES"),
    Tensor("streaming", "BOOL"),
    Tensor("stream", "BOOL"),
    Tensor("sampling_parameters", "BYTES"),
    Tensor("exclude_input_in_output", "BOOL"),
    *(Tensor(name, "BOOL") for name in ASKED_OUTPUTS),
)
"""Inputs of every model. Only the first one is required."""
OUTPUTS = (
    Tensor(TEXT_OUTPUT, "BYTES", -1),
    Tensor(FINISH_REASON, "BYTES", -1),
    Tensor("cumulative_logprob", "FP32", -1),
    Tensor("logprobs", "BYTES", -1),
    Tensor("num_input_tokens", "UINT32"),
    Tensor("num_output_tokens", "UINT32", -1),
)
INPUT_TYPES = {tensor.name: tensor.datatype for tensor in INPUTS}
OUTPUT_TYPES = {tensor.name: tensor.datatype for tensor in OUTPUTS}


def server_metadata() -> Json:
    return {"name": PLATFORM, "version": __version__, "extensions": list(EXTENSIONS)}


def model_metadata(model: str) -> Json:
    return {
        "name": model,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [tensor.description for tensor in INPUTS],
        "outputs": [tensor.description for tensor in OUTPUTS],
    }


def model_config(model: str) -> Json:
    """Returns a model's configuration: requests are not batches, and each may get any number of responses."""
    inputs = [{**entry, "optional": entry["name"] != INPUTS[0].name} for entry in _configured(INPUTS)]
    return {
        "name": model,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": 0,
        "input": inputs,
        "output": _configured(OUTPUTS),
        "model_transaction_policy": {"decoupled": True},
    }


def _configured(tensors: Iterable[Tensor]) -> list[Json]:
    return [
        {"name": tensor.name, "data_type": CONFIG_TYPES[tensor.datatype], "dims": [tensor.length]} for tensor in tensors
    ]
