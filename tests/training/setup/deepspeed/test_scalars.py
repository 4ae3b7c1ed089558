"""Parameters without dimensions, and models that nothing prepares, most of it under the real engine."""

from __future__ import annotations

import re
import runpy
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
import torch
from accelerators import quiet, settings, wrap_all
from runs import SCRIPTS, run_command

from zerofit.core.upstream.deepspeed import BROADCAST_MODEL
from zerofit.training.setup.deepspeed import scalars

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = SCRIPTS / "scaled_pairs.py"


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"^(?:loss|scale \(\)) (\S+)$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of both models."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    runpy.run_path(str(_SCRIPT))["Scaled"](BertConfig(vocab_size=64, **sizes)).save_pretrained(
        folder / "scaled"
    )
    BertModel(BertConfig(vocab_size=64, **sizes)).save_pretrained(folder / "teacher")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "how"), [("2", ()), ("3", ()), ("3", ("copies",))])
def test_they_train_as_in_one_process(stage: str, how: tuple[str, ...], models: Path, tmp_path: Path) -> None:
    alone = run_command((sys.executable, str(_SCRIPT), str(models), "8", *how), tmp_path).check()
    flags = ("--cpu", "--gpus", "2xA100-40G", "--zero-stage", stage)
    command = (sys.executable, "-m", "zerofit", "launch", *flags, str(_SCRIPT), str(models), "4", *how)
    run = run_command(command, tmp_path, CUDA_VISIBLE_DEVICES="").check()
    expected = _numbers(alone.stdout)
    assert len(expected) == 5
    assert expected[0] > expected[3]
    assert _numbers(run.stdout) == pytest.approx(expected, rel=1e-4)
    said = run.stderr + run.stdout
    for name in ("BertModel", "BertForSequenceClassification"):
        assert (f"{name} is loaded whole on each rank, since the script does not prepare it" in said) == (
            stage == "3"
        )
    assert ("Scaled is loaded whole on each rank, since it can't be created partitioned" in said) == bool(how)
    assert "zero3-model-needs-engine" not in said


@pytest.mark.parametrize("fails", [True, False])
def test_a_scalar_has_a_dimension_only_while_the_weights_are_broadcast(fails: bool) -> None:
    seen = []

    class Engine:
        def __init__(self, *parameters: torch.nn.Parameter) -> None:
            self.module = torch.nn.ParameterList(parameters)

        def broadcast(self) -> None:
            for parameter in self.module:
                parameter.data.view(torch.uint8)  # as DeepSpeed does, and torch refuses for scalars
                seen.append(tuple(parameter.shape))
            if fails:
                raise RuntimeError("a rank is gone")

    setattr(Engine, BROADCAST_MODEL, Engine.broadcast)
    wrap_all(Engine, scalars.engine_wrappers(Engine, settings(), quiet()))
    engine = Engine(torch.nn.Parameter(torch.tensor(2.5)), torch.nn.Parameter(torch.ones(2)))
    with pytest.raises(RuntimeError, match="a rank is gone") if fails else nullcontext():
        getattr(engine, BROADCAST_MODEL)()
    assert seen == [(1,), (2,)]
    assert [tuple(parameter.shape) for parameter in engine.module] == [(), (2,)]
    assert engine.module[0].item() == 2.5
