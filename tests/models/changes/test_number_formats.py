"""tf32 is torch's own setting for matrix products, and where no GPU has it the user is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zerofit.models.changes.kernels import set_tf32


@pytest.fixture(autouse=True)
def _precision_stays() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("wanted", "precision"), [(True, "high"), (False, "highest")])
def test_the_setting_is_torchs_own_and_can_be_read_in_each_way(wanted: bool, precision: str) -> None:
    set_tf32(not wanted)
    set_tf32(wanted)
    assert torch.get_float32_matmul_precision() == precision
    assert torch.backends.cuda.matmul.allow_tf32 is wanted


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a process without a GPU")
def test_without_a_gpu_the_user_is_told_that_it_changes_nothing() -> None:
    (note,) = set_tf32(True)
    assert note == ("fp32 matrix products use tf32, without effect here: no GPU of this process has tf32")
