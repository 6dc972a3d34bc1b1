"""Ranks that each compute a share of a model on a device give the tokens and pages of one that computes all of it.

The CPU and the reference take the device's and the kernels' place, and ranks are threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.unit.engine.batches import Stream, generate
from tests.unit.engine.reference_attention import reference_kernels
from tests.unit.models.family_configs import CONFIGS, WINDOW
from tests.unit.models.shares.test_share import Meeting, ThreadRank
from tests.unit.models.test_registry import saved
from twostroke.config import ModelConfig, Role, ScheduleConfig, WorkerConfig
from twostroke.engine.backends.cuda.accelerator import CpuAccelerator
from twostroke.engine.backends.cuda.plan import DevicePlan, make_device_runner
from twostroke.engine.backends.cuda.runner import DeviceRunner
from twostroke.kernels.page_forms.page_conversion import convert_page
from twostroke.kv_cache.form import Conversion, KvForm
from twostroke.models.decoders.collective import Alone, Collective
from twostroke.models.registry import read_spec
from twostroke.models.shares.share import share_of
from twostroke.models.weights.files import TensorFiles
from twostroke.scheduler.batch import Batch, StepResult

PAGES, CHUNK, ANSWER = 8, 9, 8
CPU = torch.device("cpu")


class QuietRank(ThreadRank):
    """The first rank alone gets logits, as of processes."""

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:  # type: ignore[override]
        whole = super().gather(part)
        return whole if self.rank == 0 else None


class DeviceShares:
    """The runners of all ranks as one, and each one's part of the pages."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.threads = ThreadPoolExecutor(ranks)
        meeting = Meeting(ranks)
        made = self.threads.map(lambda rank: self._made(directory, rank, ranks, meeting), range(ranks))
        self.runners, self.pages = zip(*made, strict=True)

    def _made(self, directory: Path, rank: int, ranks: int, meeting: Meeting) -> tuple[DeviceRunner, torch.Tensor]:
        config = WorkerConfig(
            role=Role.DECODE,
            worker_id="worker",
            model=ModelConfig(model=str(directory), dtype="float32", tp=ranks, max_model_len=96),
            schedule=ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=32),
        )
        plan = DevicePlan.of(config, share_of(read_spec(directory), rank, ranks), CPU)
        pages = torch.zeros((PAGES + 1, plan.needs().page_bytes), dtype=torch.uint8)

        def join() -> Collective:
            return Alone() if ranks == 1 else QuietRank(meeting, rank)

        with TensorFiles(directory, torch.float32, CPU) as files:
            return make_device_runner(plan, files, [pages], CpuAccelerator(), reference_kernels, join), pages

    def run(self, batch: Batch) -> StepResult:
        batches = [batch, *[batch.without_draws()] * (len(self.runners) - 1)]
        first, *others = self.threads.map(lambda runner, own: runner.run(own), self.runners, batches)
        assert not any(other.tokens for other in others), "the first rank alone draws"
        return first


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("gemma3", 2), ("gpt_neox", 2), ("qwen2, windows above", 4), ("qwen2_moe", 2), ("qwen2_moe", 4), ("gpt_oss", 2)],
)
def test_ranks_have_the_tokens_and_pages_of_one_that_computes_all(name: str, ranks: int, tmp_path: Path) -> None:
    """With output norms, windows and tied words; parallel layers and biases; heads that ranks share; experts."""
    saved(CONFIGS[name], tmp_path)
    spec = read_spec(tmp_path)
    prompt = [7919 * index % spec.vocab_size for index in range(1, 2 * WINDOW)]
    alone, shares = DeviceShares(tmp_path, 1), DeviceShares(tmp_path, ranks)
    answers = [generate(each, Stream(prompt.copy(), [7, 2, 5, 4]), ANSWER, CHUNK) for each in (alone, shares)]
    assert answers[0] == answers[1]
    form = f"float32/{ranks}"
    conversion = Conversion(KvForm(form), KvForm("float32"), spec.page_shape(16), has_pieces=False)
    ranges = min(ranks, spec.kv_heads)
    own = shares.pages[:: ranks // ranges]
    for page in (7, 2):  # the blocks that are full
        whole = torch.zeros_like(alone.pages[0][page])
        convert_page(conversion, torch.cat([part[page] for part in own]), whole)
        expected = alone.pages[0][page].view(torch.float32)
        torch.testing.assert_close(whole.view(torch.float32), expected, rtol=1e-4, atol=1e-4)
        assert expected.count_nonzero() > 0
    loads = [None if each.expert_load is None else each.expert_load.tokens.tolist() for each in shares.runners]
    assert loads == [loads[0]] * ranks
    assert loads[0] == (None if alone.runners[0].expert_load is None else alone.runners[0].expert_load.tokens.tolist())
