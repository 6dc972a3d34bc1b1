"""Products of codes in the interpreter: each weight to the bit, and products against torch's.

A row's bits in company are compared by `make gpu`: the interpreter multiplies as numpy does, where they depend on it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig

from tests.unit.engine.backends.cuda.test_device_codes import runner_of
from tests.unit.engine.batches import Stream, step
from tests.unit.engine.reference_attention import reference_kernels
from tests.unit.kernels.stored_matrices import FP8, LAYOUTS, stored
from tests.unit.models.test_registry import saved
from tests.unit.models.weights.stored.coded_models import FORMATS, quantised
from tests.unit.models.weights.stored.gguf_models import SIZES
from twostroke.engine.backends.cuda.plan import DeviceKernels
from twostroke.kernels.activation import GATED_SILU
from twostroke.kernels.layout import device_matrix_bytes
from twostroke.kernels.pools.parted_pool import AnyPool
from twostroke.kernels.products.device_codes import DeviceMatrix, TorchCodeProducts, weights_of
from twostroke.kernels.products.device_linear import DeviceLinears
from twostroke.kernels.products.elementwise import TorchElementwise
from twostroke.kernels.products.stored import StoredMatrix
from twostroke.kernels.triton import codes
from twostroke.kernels.triton.codes import TritonCodeProducts
from twostroke.models.spec import ModelSpec

INPUTS = 256
CPU = torch.device("cpu")
ALL = LAYOUTS | {
    "FP8 in blocks": FP8,
    "FP8 of groups that are not a power of two": dataclasses.replace(FP8, group=96),
    "FP8 per output": dataclasses.replace(FP8, group=INPUTS),
}
SLACK = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def linears(products: TritonCodeProducts | TorchCodeProducts) -> DeviceLinears:
    return DeviceLinears(CPU, TorchElementwise(), products)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ALL)
def test_weights_are_those_of_the_file_to_the_bit(name: str) -> None:
    """Products with the rows of the unit matrix are the weights themselves."""
    matrix, unit = stored(ALL[name], 9, INPUTS), torch.eye(INPUTS)
    dense = matrix.dense()
    for dtype in (torch.float32, torch.float16):  # interpreted, bfloat16 is cut off and not rounded
        got = linears(TritonCodeProducts()).linear((matrix,))(unit.to(dtype))
        assert torch.equal(got, dense.to(dtype).T)
    assert torch.equal(weights_of(DeviceMatrix.of(matrix, CPU)), dense)


@pytest.mark.parametrize("dtype", SLACK)
@pytest.mark.parametrize("name", ["Q4_1", "MXFP4", "Q6_K", "FP8 in blocks"])
def test_products_equal_those_of_the_expanded_matrix(name: str, dtype: torch.dtype) -> None:
    matrix, bias = stored(ALL[name], 75, INPUTS), numbers(75, seed=1).to(dtype)
    x = numbers(67, INPUTS).to(dtype)
    right = functional.linear(x, matrix.dense().to(dtype), bias)
    got = linears(TritonCodeProducts()).linear((matrix,), bias)(x)
    torch.testing.assert_close(got, right, rtol=SLACK[dtype], atol=SLACK[dtype] * float(right.float().std()))


@pytest.mark.parametrize("name", ["Q4_1", "MXFP4", "Q6_K", "FP8 in blocks"])
def test_many_rows_meet_the_weights_of_the_file_some_outputs_at_a_time(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codes, "EXPANDED_BYTES", 64 * INPUTS * 2)
    matrix, bias = stored(ALL[name], 130, INPUTS), numbers(130, seed=1).half()
    x = numbers(codes.EXPANDED_ROWS, INPUTS).half()
    for each in (None, bias):
        got = linears(TritonCodeProducts()).linear((matrix,), each)(x)
        assert torch.equal(got, functional.linear(x, matrix.dense().half(), each))


@pytest.mark.parametrize("inputs", [96, 160, 200])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_may_end_within_a_tile_and_within_a_group(inputs: int, bits: int) -> None:
    layout = dataclasses.replace(LAYOUTS["GPTQ" if bits == 4 else "Q8_0"], group=40)
    matrix = stored(layout, 9, 240)
    cut = StoredMatrix(layout, 9, inputs, lambda: dataclasses.replace(matrix.read(), codes=codes_to(matrix, inputs)))
    x = numbers(3, inputs)
    got = linears(TritonCodeProducts()).linear((cut,))(x)
    torch.testing.assert_close(got, x @ cut.dense().T, rtol=1e-5, atol=1e-5)


def codes_to(matrix: StoredMatrix, inputs: int) -> torch.Tensor:
    return matrix.read().codes[:, :inputs].contiguous()


def test_act_order_and_factors_are_those_of_the_file() -> None:
    order = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1)).int()
    matrix = dataclasses.replace(stored(ALL["GPTQ"], 48, INPUTS), order=order)
    matrix = matrix.scaled(torch.exp2(torch.arange(48) % 7 - 3.0))
    for products in (TritonCodeProducts(), TorchCodeProducts()):
        got = linears(products).linear((matrix,))(torch.eye(INPUTS))
        assert torch.equal(got, matrix.dense().T)


def test_matrices_of_several_layouts_are_one_product() -> None:
    parts = [stored(ALL[name], rows, INPUTS) for name, rows in (("Q4_K", 64), ("Q4_K", 20), ("Q6_K", 33))]
    plain, bias, x = numbers(7, INPUTS), numbers(124, seed=3), numbers(5, INPUTS)
    right = functional.linear(x, torch.cat([*(part.dense() for part in parts), plain]), bias)
    for products in (TritonCodeProducts(), TorchCodeProducts()):
        got = linears(products).linear((*parts, plain), bias)(x)
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def test_gates_let_values_through() -> None:
    gate, up = (stored(ALL["Q4_0"], 40, INPUTS, seed) for seed in (1, 2))
    x = numbers(4, INPUTS)
    right = functional.silu(x @ gate.dense().T) * (x @ up.dense().T)
    got = linears(TritonCodeProducts()).activated((gate, up), None, GATED_SILU)(x)
    torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("inputs", [INPUTS, 1792])
def test_the_bill_knows_the_bytes_of_a_matrix_on_a_device(name: str, inputs: int) -> None:
    layout = ALL[name] if inputs % ALL[name].group == 0 else dataclasses.replace(ALL[name], group=256)
    matrix = DeviceMatrix.of(stored(layout, 12, inputs), CPU)
    tensors = [tensor for tensor in (matrix.codes, matrix.scales, matrix.mins) if tensor is not None]
    assert sum(tensor.nbytes for tensor in tensors) == device_matrix_bytes(layout, 12, inputs)


@pytest.mark.parametrize("form", ["GPTQ with act-order", "FP8 in blocks"])
def test_a_step_of_a_model_has_the_logits_of_expanded_weights(form: str, tmp_path: Path) -> None:
    saved(LlamaConfig(**SIZES), tmp_path)
    quantised(tmp_path, FORMATS[form])

    def kernels(pool: AnyPool, spec: ModelSpec, dtype: torch.dtype) -> DeviceKernels:
        return dataclasses.replace(reference_kernels(pool, spec, dtype), linears=linears(TritonCodeProducts()))

    logits = []
    for keeps_codes, over in ((True, kernels), (False, reference_kernels)):
        runner = runner_of(tmp_path, keeps_codes=keeps_codes, kernels_over=over)
        logits.append(runner.logits(step([(Stream(list(range(3, 30)), [2, 1]), 27)])))
        runner.close()
    assert logits[0] is not None
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
