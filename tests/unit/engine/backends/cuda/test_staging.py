"""A step's arrays in one buffer: where they lie, and that they arrive as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from twostroke.engine.backends.cuda.staging import ALIGNMENT, HostArray, Staging, packed_offsets

CPU = torch.device("cpu")


def arrays(seed: int = 0) -> list[HostArray]:
    draw = np.random.default_rng(seed)
    return [
        draw.integers(0, 1 << 40, 3),
        draw.integers(0, 1000, 5, np.int32),
        np.zeros(0, np.int64),
        draw.integers(0, 1000, (2, 7), np.int32),
    ]


def test_arrays_lie_end_to_end_each_aligned() -> None:
    offsets = packed_offsets(arrays())
    assert offsets == [0, 32, 64, 64, 128]
    assert all(offset % ALIGNMENT == 0 for offset in offsets)


def test_an_upload_arrives_as_it_was() -> None:
    staging = Staging(4096, CPU)
    for seed in range(3):
        sent = arrays(seed)
        received = staging.upload(sent)
        assert [tensor.dtype for tensor in received] == [torch.int64, torch.int32, torch.int64, torch.int32]
        for array, tensor in zip(sent, received, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)


def test_slices_and_columns_arrive_as_they_were() -> None:
    table = np.arange(24, dtype=np.int32).reshape(4, 6)
    received = Staging(4096, CPU).upload([table[1:3, :4], np.arange(9, dtype=np.int64)[::2]])
    np.testing.assert_array_equal(received[0].numpy(), table[1:3, :4])
    assert received[0].is_contiguous()
    assert received[1].tolist() == [0, 2, 4, 6, 8]


def test_equal_shapes_arrive_in_equal_places() -> None:
    staging = Staging(4096, CPU)
    first, second = staging.upload(arrays(1)), staging.upload(arrays(2))
    assert [tensor.data_ptr() for tensor in first] == [tensor.data_ptr() for tensor in second]


def test_a_step_larger_than_the_buffer_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="a step of 128 bytes in a staging buffer of 112"):
        Staging(112, CPU).upload(arrays())
