"""The rules of optimizers: on files and scripts, on zerofit's own flags, and with facts missing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from zerofit.checking.engine import DEEPSPEED_NAMES, check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rules.optimizer.rules import RULES
from zerofit.checking.situation import RunSettings, Situation, TrainerSettings
from zerofit.configs.document import Document, SetValue
from zerofit.configs.text.read import read_document
from zerofit.core.command import Launcher, Route
from zerofit.core.facts import Versions
from zerofit.core.optimizers.lookup import optimizer_of_deepspeed
from zerofit.core.plan import Topology
from zerofit.core.setting import Place, Said
from zerofit.core.strategy import Engine, OffloadDevice, OptimizerName, Strategy, ZeroStage

_NONE, _CPU = OffloadDevice.NONE, OffloadDevice.CPU


def _situation(
    made_by_script: str | None,
    *,
    stage: int = 2,
    offload: OffloadDevice = _NONE,
    forces: bool = True,
    route: Route | None = Route.ACCELERATE,
    on_cpu: bool = False,
    **config: Any,
) -> Situation:
    document = read_document(json.dumps(config), name="ds_config.json")
    section = document.value("optimizer", "type")
    asked = made_by_script if section is None else optimizer_of_deepspeed(section)
    return Situation(
        settings=RunSettings(
            names=dict(DEEPSPEED_NAMES),
            engine=Said(value=Engine.DEEPSPEED, text="ds_config.json"),
            zero_stage=Said(value=ZeroStage(stage), text=f"stage={stage}"),
            optimizer_offload=Said(value=offload, text=f"offload={offload}"),
            param_offload=Said(value=_NONE, text="no offload_param"),
            force_cpu_optimizer=Said(value=forces, text="force"),
            optimizer=None if asked is None else Said(value=asked, text=asked),
        ),
        route=route,
        deepspeed=document if isinstance(document, Document) else None,
        topology=Topology(world_size=2, on_cpu=on_cpu),
    )


def _ids(situation: Situation) -> list[str]:
    return [finding.rule for finding in check(situation, rules=RULES).findings]


_OFFLOADED: dict[str, Any] = {"offload": _CPU}
_UNFORCED: dict[str, Any] = {"offload": _CPU, "forces": False}
_NATIVE: dict[str, Any] = {"route": Route.NATIVE}
_UNTESTED = {"zero_allow_untested_optimizer": True}


@pytest.mark.parametrize(
    ("optimizer", "placed", "expected"),
    [
        ("torch.AdamW", {}, []),
        ("torch.AdamW", _OFFLOADED, []),
        ("torch.AdamW", {**_OFFLOADED, "stage": 3}, []),
        ("torch.Adam", _OFFLOADED, []),
        ("bitsandbytes.AdamW", _OFFLOADED, []),
        ("bitsandbytes.Adam", _OFFLOADED, []),
        ("torch.SGD", {}, []),
        ("torch.SGD", _OFFLOADED, ["offload-needs-adam"]),
        ("torch.SGD", {**_OFFLOADED, "offload": OffloadDevice.NVME, "stage": 3}, ["offload-needs-adam"]),
        ("torch.SGD", {**_OFFLOADED, "route": Route.TRAINER}, ["offload-needs-adam"]),
        ("torch.SGD", _UNFORCED, []),
        ("torch.SGD", {**_OFFLOADED, **_NATIVE}, ["native-offload-needs-cpu-adam"]),
        ("torch.SGD", _NATIVE, ["untested-optimizer-needs-flag"]),
        ("torch.SGD", {**_NATIVE, **_UNTESTED}, []),
        ("torch.SGD", {**_NATIVE, "stage": 0}, []),
        ("bitsandbytes.AdamW8bit", {}, []),
        ("bitsandbytes.AdamW8bit", _OFFLOADED, ["offload-changes-weight-decay"]),
        ("bitsandbytes.AdamW8bit", _UNFORCED, ["eight-bit-optimizer-on-cpu"]),
        ("bitsandbytes.PagedAdamW", _OFFLOADED, ["offload-changes-weight-decay"]),
        (
            "bitsandbytes.PagedAdamW8bit",
            {**_OFFLOADED, "route": Route.TRAINER},
            ["offload-changes-weight-decay"],
        ),
        ("bitsandbytes.Adam8bit", _OFFLOADED, ["offload-changes-weight-decay"]),
        ("bitsandbytes.PagedLion8bit", _OFFLOADED, ["offload-needs-adam"]),
        ("bitsandbytes.Lion", _OFFLOADED, ["offload-swap-fails-in-prepare"]),
        ("bitsandbytes.Lion8bit", _OFFLOADED, ["offload-needs-adam"]),
        ("torch.Adagrad", _OFFLOADED, ["offload-swap-fails-in-prepare"]),
        ("torch.Adagrad", {}, ["zero-rebuilds-adagrad"]),
        ("torch.Adagrad", {"stage": 0}, []),
        ("transformers.Adafactor", {}, ["zero-flattens-tensors"]),
        ("transformers.Adafactor", {"stage": 0}, []),
        ("transformers.Adafactor", _OFFLOADED, ["offload-swap-fails-in-step"]),
        ("transformers.Adafactor", _UNFORCED, ["zero-flattens-tensors"]),
        ("bitsandbytes.AdEMAMix8bit", _OFFLOADED, ["offload-swap-fails-in-step"]),
        ("torch.Muon", {}, ["muon-needs-matrices"]),
        ("torch.Muon", _OFFLOADED, ["offload-needs-adam"]),
        ("galore_torch.GaLoreAdamW", {}, ["muon-needs-matrices"]),
        ("apollo_torch.APOLLOAdamW", {"stage": 3}, ["muon-needs-matrices"]),
        ("apollo_torch.APOLLOAdamW", {"stage": 0}, []),
        ("schedulefree.AdamWScheduleFree", {}, ["zero-flattens-tensors"]),
        ("schedulefree.AdamWScheduleFree", _OFFLOADED, ["offload-needs-adam"]),
        ("torchao.AdamW8bit", {}, []),
        ("torchao.AdamW4bit", _OFFLOADED, ["offload-changes-weight-decay"]),
        ("deepspeed.MuonWithAuxAdam", {"stage": 3}, ["muon-needs-whole-gradients"]),
        ("deepspeed.DeepSpeedCPUAdam", _OFFLOADED, ["offload-changes-weight-decay"]),
        ("deepspeed.DeepSpeedCPUAdam", {**_OFFLOADED, **_NATIVE}, []),
        ("deepspeed.DeepSpeedCPUAdam", {}, ["cpu-optimizer-needs-offload"]),
        ("deepspeed.DeepSpeedCPUAdam", {"on_cpu": True}, []),
        ("deepspeed.FusedAdam", _UNFORCED, ["gpu-optimizer-on-cpu"]),
        ("accelerate.DummyOptim", {}, ["dummy-optimizer-needs-section"]),
        ("other:lion_pytorch.Lion", _OFFLOADED, ["offload-needs-adam"]),
        ("other:lion_pytorch.Lion", {}, []),
        ("other:lion_pytorch.Lion", _NATIVE, ["untested-optimizer-needs-flag"]),
        (None, {"optimizer": {"type": "AdamW"}, **_OFFLOADED}, []),
        (None, {"optimizer": {"type": "adamw"}, **_OFFLOADED, **_NATIVE}, []),
        *(
            (None, {"optimizer": {"type": kind}}, ["optimizer-type-removed"])
            for kind in ("OneBitAdam", "OnebitAdam", "onebitlamb", "ZeroOneAdam", "zerooneadam")
        ),
        (None, {"optimizer": {"type": "AdamP"}}, ["unknown-optimizer-type"]),
        (None, {"optimizer": {"type": "MUON"}, "stage": 2}, []),
        (None, {"optimizer": {"type": "LION"}}, []),
        (None, {"optimizer": {"type": "sgd"}}, ["unknown-optimizer-type"]),
        (None, {"optimizer": {"type": "SparseAdam"}}, []),
        (None, {"optimizer": {"type": "MuAdam"}}, []),
        (None, {"optimizer": {"type": "SGD"}}, ["untested-optimizer-needs-flag"]),
        (None, {"optimizer": {"type": "SGD"}, "stage": 0}, []),
        (None, {"optimizer": {"type": "Muon"}, "stage": 3}, ["muon-needs-whole-gradients"]),
        (None, {"optimizer": {"type": "Muon"}, "stage": 2}, []),
        (
            None,
            {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.01}}},
            ["adam-section-decays-as-adamw"],
        ),
        (None, {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.0}}}, []),
        (None, {"optimizer": {"type": "Adam", "params": {"weight_decay": "auto"}}}, []),
        (None, {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": True}}}, []),
        (None, {"optimizer": {"type": "Adam"}}, []),
    ],
)
def test_findings(optimizer: str | None, placed: dict[str, Any], expected: list[str]) -> None:
    assert _ids(_situation(optimizer, **placed)) == expected


@pytest.mark.parametrize(
    ("optimizer", "fix"),
    [
        ("torch.SGD", "write zero_allow_untested_optimizer: true"),
        ("torch.Muon", "use AdamW"),  # it needs matrices, and ZeRO flattens them
        ("bitsandbytes.LARS", "use AdamW"),
    ],
)
def test_an_untested_optimizer_is_allowed_only_where_it_then_trains(optimizer: str, fix: str) -> None:
    (finding,) = check(_situation(optimizer, **_NATIVE), rules=RULES).findings
    assert (finding.rule, finding.fix) == ("untested-optimizer-needs-flag", fix)


def test_a_finding_stands_where_the_optimizer_is_named_or_else_where_it_is_put() -> None:
    script, file = Place(file="train.py", line=7), Place(file="ds_config.json", line=3)
    situation = _situation("torch.SGD", offload=_CPU)
    settings = situation.settings
    assert settings.optimizer is not None
    places = []
    for place in (script, None):
        placed = replace(
            settings,
            optimizer=replace(settings.optimizer, place=place),
            optimizer_offload=replace(settings.optimizer_offload, place=file),
        )
        (finding,) = check(replace(situation, settings=placed), rules=RULES).findings
        places.append(finding.place)
    assert places == [script, file]


def test_an_unknown_optimizer_or_route_is_said_where_it_matters() -> None:
    offloaded = _situation("torch.SGD", offload=_CPU, route=None)
    assert _facts(offloaded) == {"which library passes the optimizer to DeepSpeed"}
    unknown = replace(offloaded, settings=replace(offloaded.settings, optimizer=None))
    assert _facts(unknown) == {"the optimizer, which the script creates"}
    assert _facts(_situation("config.AdamW", offload=_CPU, route=None)) == set()


@pytest.mark.parametrize(
    ("kind", "deepspeed", "stage", "expected"),
    [
        ("OneBitAdam", "0.19.6", 0, []),
        ("OnebitAdam", "0.18.3", 0, []),
        ("OnebitLamb", "0.19.6", 1, ["onebit-optimizer-without-zero"]),
        ("zerooneadam", "0.19.0", 2, ["onebit-optimizer-without-zero"]),
        ("OneBitAdam", "0.19.6", 3, ["onebit-optimizer-without-zero"]),
        ("OneBitAdam", "0.19.7", 0, ["optimizer-type-removed"]),
        ("ZeroOneAdam", "0.20.1", 2, ["optimizer-type-removed"]),
        ("AdamW", "0.19.6", 2, []),
    ],
)
def test_one_bit_optimizers_are_judged_by_the_installed_release(
    kind: str, deepspeed: str, stage: int, expected: list[str]
) -> None:
    versions = Versions(python="3.11", zerofit="0", deepspeed=deepspeed)
    situation = replace(_situation(None, stage=stage, optimizer={"type": kind}), versions=versions)
    assert _ids(situation) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ["offload-ignores-eight-bits"]),  # Trainer's default decay is 0
        ({"weight_decay": 0.0}, ["offload-ignores-eight-bits"]),
        ({"weight_decay": 0.1}, ["offload-changes-weight-decay"]),
        ({"weight_decay": 1e-4}, ["offload-changes-weight-decay"]),
        (None, ["offload-changes-weight-decay"]),
    ],
)
def test_a_swapped_variant_of_adam_is_judged_by_its_weight_decay(
    arguments: dict[str, float] | None, expected: list[str]
) -> None:
    said = {name: Said(value=value, text=f"{name}={value}") for name, value in (arguments or {}).items()}
    trainer = TrainerSettings(said=said, is_complete=arguments is not None)
    situation = _situation("bitsandbytes.PagedAdamW8bit", offload=_CPU, route=Route.TRAINER)
    assert _ids(replace(situation, trainer=trainer)) == expected
    paged = _situation("bitsandbytes.PagedAdamW", offload=_CPU, route=Route.TRAINER)
    assert _ids(replace(paged, trainer=trainer)) == [rule for rule in expected if "bits" not in rule]


def test_the_fix_names_the_optimizer_of_its_route_and_the_section_of_the_file() -> None:
    for route, adamw in ((Route.TRAINER, "optim=adamw_torch"), (Route.ACCELERATE, "torch.optim.AdamW")):
        (finding,) = (
            finding
            for finding in check(
                _situation("bitsandbytes.PagedAdamW", offload=_CPU, route=route), rules=RULES
            ).findings
            if finding.rule == "offload-changes-weight-decay"
        )
        assert finding.fix == (
            f"use {adamw}, which costs no GPU memory with offload, or leave out offload_optimizer"
        )


def _facts(situation: Situation) -> set[str]:
    verdict = check(situation, rules=RULES)
    assert verdict.findings == ()
    return {unknown.fact for unknown in verdict.unknown}


@pytest.mark.parametrize(
    ("kind", "stage", "edits"),
    [
        ("SGD", 2, ("zero_allow_untested_optimizer", True)),
        ("Adafactor", 2, None),
        ("Muon", 3, ("zero_optimization.reduce_scatter", False)),
        ("OneBitAdam", 2, None),
    ],
)
def test_what_has_one_right_answer_is_put_right(
    kind: str, stage: int, edits: tuple[str, bool] | None
) -> None:
    (finding,) = check(_situation(None, stage=stage, optimizer={"type": kind}), rules=RULES).findings
    expected = ()
    if edits is not None:
        path, value = edits
        expected = (SetValue(document="ds_config.json", path=tuple(path.split(".")), value=value),)
    assert finding.edits == expected


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        (OptimizerName.ADAMW, None),
        (OptimizerName.SGD, "offload-needs-adam"),
        (OptimizerName.PAGED_ADAMW, "offload-needs-adam"),
        (OptimizerName.ADAMW_8BIT, "offload-needs-adam"),
        (OptimizerName.ADAFACTOR, "offload-swap-fails-in-step"),
    ],
)
def test_zerofits_own_optimizers_under_offload(optimizer: OptimizerName, rule: str | None) -> None:
    strategy = Strategy(
        engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS, optimizer_offload=_CPU, optimizer=optimizer
    )
    situation = situation_of_strategy(strategy, topology=Topology(world_size=2))
    assert situation.launcher is Launcher.ZEROFIT
    assert _ids(situation) == ([] if rule is None else [rule])
