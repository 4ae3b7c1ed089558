"""The model, batch and steps that every rung has in common, and what is counted of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from zerofit.core.errors import UserError
from zerofit.measuring.made import make_model, make_samples, without_dropout
from zerofit.measuring.memory import (
    LiveTensors,
    forget_making,
    gradient_bytes,
    process_bytes,
    state_bytes,
    weight_bytes,
)
from zerofit.measuring.refusals import check_can_run
from zerofit.measuring.rungs import baseline, climb, parse_rungs
from zerofit.measuring.spec import Spec
from zerofit.measuring.train import Trainee, make_trainee

_CONFIG = {
    "model_type": "bert",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _spec(folder: Path, rungs: str) -> Spec:
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    base = baseline(batch_size=4, sequence_length=16, attention="eager")
    run = climb(parse_rungs(rungs), base, is_cumulative=True)[-1].run
    return Spec(
        model=str(folder),
        task="sequence-classification",
        strategy=run.strategy,
        sequence_length=run.sequence_length,
        full_length=16,
        num_steps=1,
        on_cpu=True,
        result_file="",
    )


def _trainee(folder: Path, rungs: str) -> Trainee:
    spec = _spec(folder, rungs)
    model = make_model(spec, "cpu")
    return make_trainee(model, make_samples(model, spec), spec, "cpu")


def _losses(trainee: Trainee) -> list[float]:
    with without_dropout(trainee.model):
        return [trainee.step() for _ in range(3)]


@pytest.mark.parametrize("rungs", ["accumulation", "micro-batch-2", "checkpointing", "micro-batch-2,sdpa"])
def test_what_does_not_change_the_mathematics_has_the_same_losses(tmp_path: Path, rungs: str) -> None:
    whole = _losses(_trainee(tmp_path, "baseline"))
    assert _losses(_trainee(tmp_path, rungs)) == pytest.approx(whole, rel=1e-6)
    assert whole[0] > whole[1] > whole[2]


@pytest.mark.parametrize("rungs", ["sgd", "freeze-blocks", "length-8"])
def test_what_changes_the_training_has_other_losses(tmp_path: Path, rungs: str) -> None:
    whole = _losses(_trainee(tmp_path, "baseline"))
    assert _losses(_trainee(tmp_path, rungs)) != pytest.approx(whole, rel=1e-6)


def test_a_shorter_rung_has_the_same_samples_cut_off(tmp_path: Path) -> None:
    long, short = (_trainee(tmp_path, rungs).samples for rungs in ("baseline", "length-8"))
    assert short["input_ids"].equal(long["input_ids"][:, :8])
    assert short["labels"].equal(long["labels"])
    assert short["attention_mask"].tolist() == [[1] * 7 + [0]] * 4


def test_dropout_is_off_for_a_while_only(tmp_path: Path) -> None:
    trainee = _trainee(tmp_path, "baseline")
    batch = {name: tensor[:2] for name, tensor in trainee.samples.items()}
    with without_dropout(trainee.model):
        assert trainee.forward(batch).item() == trainee.forward(batch).item()
    assert trainee.forward(batch).item() != trainee.forward(batch).item()
    assert trainee.model.training


def test_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    trainee = _trainee(tmp_path, "baseline")
    num_parameters = sum(one.numel() for one in trainee.model.parameters())
    num_buffers = sum(one.nbytes for one in trainee.model.buffers())
    trainee.backward()
    assert weight_bytes(trainee.model) == 4 * num_parameters + num_buffers
    assert gradient_bytes(trainee.model) == 4 * num_parameters
    trainee.update()
    steps = 4 * len(list(trainee.model.parameters()))
    assert state_bytes(trainee.optimizer) == 8 * num_parameters + steps
    assert gradient_bytes(trainee.model) == 0


def test_tensors_that_died_and_views_of_known_ones_are_not_counted() -> None:
    weight, batch = torch.ones(10, 10, requires_grad=True), torch.ones(10, 10)
    live = LiveTensors([weight, batch])
    with live.mode:
        product = batch @ weight.t()
        del product
        kept = (batch @ weight.t()).exp()  # exp() keeps its result; the product dies
    assert live.num_bytes() == kept.nbytes == 400


def test_what_making_a_model_took_is_forgotten() -> None:
    whole = torch.ones(64, 2**20)
    with_it = process_bytes("VmHWM")
    del whole
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this kernel keeps a process's peak")
    forget_making("cpu")
    assert process_bytes("VmHWM") < with_it - 128 * 2**20


def test_the_kernels_figures_are_read() -> None:
    assert 2**20 < process_bytes("VmRSS") <= process_bytes("VmHWM")


@pytest.mark.parametrize(
    ("rungs", "summary"),
    [
        ("tf32", "tf32 needs a GPU that has it"),
        ("paged-adamw-8bit", "paged-adamw-8bit needs a GPU"),
        ("compile", "torch.compile needs a C++ compiler"),
    ],
)
def test_what_this_machine_lacks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rungs: str, summary: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError) as raised:
        check_can_run(_spec(tmp_path, rungs))
    assert raised.value.summary == summary
