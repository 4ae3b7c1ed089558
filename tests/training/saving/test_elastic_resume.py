"""A universal checkpoint is completed for any ZeRO stage, and loaded with this run's settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from refusals import refusal

from zerofit.core.errors import UserError
from zerofit.training.saving import elastic_resume

if TYPE_CHECKING:
    from pathlib import Path

_GROUPS = [{"lr": 0.5, "weight_decay": 0.1}]


def _saved(folder: Path, *, of_stage_3: bool) -> Path:
    """Write what ds_to_universal leaves of one parameter, and return its folder."""
    parameter = folder / "zero" / "layer.weight"
    parameter.mkdir(parents=True)
    value: Any = torch.ones(4)
    torch.save(value if of_stage_3 else {"param": value}, parameter / "exp_avg.pt")
    state: dict[str, Any] = {"param_groups": _GROUPS, "loss_scaler": 8.0, "unknown": 1}
    if of_stage_3:
        state["optimizer_state_dict"] = {"state": {0: {"step": 7}}}
    else:
        torch.save(7, parameter / "step.pt")
    torch.save(state, folder / "zero" / "optimizer_state.pt")
    torch.save({"ds_version": "0.19.8"}, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize("of_stage_3", [False, True])
def test_a_checkpoint_has_what_each_stage_looks_for(tmp_path: Path, *, of_stage_3: bool) -> None:
    folder = _saved(tmp_path, of_stage_3=of_stage_3)
    before = (folder / "zero_pp_rank_0_mp_rank_00_model_states.pt").read_bytes()
    elastic_resume._fill_in(folder)
    state = torch.load(folder / "zero" / "optimizer_state.pt")
    assert state == {
        "loss_scaler": 8.0,
        "ds_version": "0.19.8",
        "param_groups": _GROUPS,
        "optimizer_state_dict": {"state": {0: {"step": 7}}, "param_groups": _GROUPS},
    }
    parameter = folder / "zero" / "layer.weight"
    assert torch.equal(torch.load(parameter / "exp_avg.pt")["param"], torch.ones(4))
    assert torch.load(parameter / "step.pt") == 7
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        assert (folder / name).read_bytes() == before


def _engine(*groups: dict[str, Any]) -> Any:
    module = torch.nn.Linear(2, 1)
    parameters = [[module.weight], [module.bias]][: len(groups)]
    optimizer = torch.optim.AdamW(
        [{"params": held, **group} for held, group in zip(parameters, groups, strict=True)]
    )
    optimizer.state[module.weight] = {"step": 7}
    return SimpleNamespace(module=module, optimizer=SimpleNamespace(optimizer=optimizer))


def test_the_rate_is_the_checkpoints_and_frozen_weights_come_back(tmp_path: Path) -> None:
    elastic_resume._fill_in(_saved(tmp_path / "tag", of_stage_3=False))
    torch.save({"bias": torch.full((1,), 3.0)}, tmp_path / elastic_resume._REST)
    engine = _engine({"lr": 0.01, "maximize": True})
    optimizer = engine.optimizer.optimizer
    assert elastic_resume._load(engine, tmp_path, "tag", lambda: "found") == "found"
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["maximize"]) == (0.5, 0.1, True)
    assert group["params"] == [engine.module.weight]
    step = optimizer.state[engine.module.weight]["step"]
    assert torch.is_tensor(step)
    assert step.item() == 7
    assert engine.module.bias.item() == 3.0


@pytest.mark.parametrize("num_saved", [1, 3])
def test_other_groups_than_those_saved_are_refused(tmp_path: Path, num_saved: int) -> None:
    folder = _saved(tmp_path / "tag", of_stage_3=False)
    torch.save({"param_groups": _GROUPS * num_saved}, folder / "zero" / "optimizer_state.pt")
    found = f"{num_saved} parameter groups, and the script creates 2"
    with pytest.raises(UserError, match=found):
        elastic_resume._load(_engine({"lr": 0.01}, {"lr": 0.02}), tmp_path, "tag", lambda: None)


@pytest.mark.parametrize(
    ("failure", "found"),
    [
        (None, None),
        (ValueError("no states"), "ValueError: no states"),
        (UserError("file-missing", "", found="latest", why="", fix=""), "file-missing: latest"),
    ],
)
def test_rank_0_converts_at_once_and_a_failure_names_the_checkpoint(
    failure: Exception | None, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted, copy = [], tmp_path / "copy"

    def convert(folder: Path, tag: str, copy: Path, *, keeps: set[str]) -> None:
        converted.append(tag)
        if failure is not None:
            raise failure

    monkeypatch.setattr(elastic_resume, "_convert", convert)
    monkeypatch.setattr(elastic_resume, "time", None)  # it waits for nobody
    if found is None:
        elastic_resume._convert_together(tmp_path, "step7", copy, keeps=set())
    else:
        refused = refusal(elastic_resume._convert_together, tmp_path, "step7", copy, keeps=set())
        assert (refused.rule, refused.found) == ("checkpoint-not-convertible", f"{tmp_path}: {found}")
    assert converted == ["step7"]
