"""Converts zerofit's own flags, or a plan and its script, to a Situation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.optimizer import optimizer_of
from zerofit.checking.inputs.situations import read_scripts
from zerofit.checking.inputs.training_arguments import trainer_of
from zerofit.checking.situation import RunSettings, Situation, setting_text
from zerofit.core.command import Launcher
from zerofit.core.optimizers.lookup import REPLACEMENT_IDS
from zerofit.core.overrides import FLAGS, NOTHING_SAID, SWITCHED, Overrides, flag_of, overrides
from zerofit.core.setting import Said
from zerofit.core.strategy import show
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Collection

    from zerofit.checking.targets import Targets
    from zerofit.core.facts import Machine, Versions
    from zerofit.core.plan import Plan, Topology
    from zerofit.core.strategy import Strategy
    from zerofit.scripts.facts import ScriptFacts


def situation_of_strategy(
    strategy: Strategy,
    *,
    topology: Topology,
    machine: Machine | None = None,
    versions: Versions | None = None,
    launcher: Launcher = Launcher.ZEROFIT,
    own_optimizer: Said[str | None] | None = None,
    typed: Collection[str] | None = None,
    script: ScriptFacts | None = None,
    said: Overrides = NOTHING_SAID,
) -> Situation:
    """Return the situation of a strategy from flags, a plan or a script.

    Args:
        strategy: the strategy.
        topology: the ranks.
        machine: the node that runs it; None if it is not this one.
        versions: the installed versions.
        launcher: starts the ranks.
        own_optimizer: the script's, by id, which is used if the strategy names none; None if unknown.
        typed: fields that the user set by flags, which findings name as flags; None: all of them.
        script: what the source of the script shows; None if unknown.
        said: what the user set; findings name what is from a file by its line.
    """

    def setting(field: str) -> Said[Any]:
        value = getattr(strategy, field)
        if said.is_in_file(field) and said.get(field) == value:
            return said.said[field]
        return Said(value=value, text=setting_text(strategy, field, is_typed=typed is None or field in typed))

    optimizer = own_optimizer
    if strategy.optimizer is not None:
        optimizer = replace(setting("optimizer"), value=REPLACEMENT_IDS[strategy.optimizer])
    nvme_path = replace(setting("nvme_path"), value=strategy.nvme_path or None)
    return Situation(
        settings=RunSettings(
            names=dict(FLAGS),
            engine=setting("engine"),
            zero_stage=setting("zero_stage"),
            optimizer_offload=setting("optimizer_offload"),
            param_offload=setting("param_offload"),
            optimizer_nvme_path=nvme_path,
            param_nvme_path=nvme_path,
            precision=setting("precision"),
            optimizer=optimizer,
            force_cpu_optimizer=Said(value=True, text="no zero_force_ds_cpu_optimizer"),
            fields=said_fields(
                overrides(
                    **{name: getattr(strategy, name) for name in FLAGS if typed is None or name in typed}
                )
            ),
        ),
        strategy=strategy,
        typed=typed,
        launcher=launcher,
        topology=topology,
        machine=machine,
        versions=versions,
        script=None if script is None else _as_launched(script),
    )


def said_fields(said: Overrides) -> dict[str, Said[Any]]:
    """Return fields of a strategy that the user set, each with its text: "--zero-stage 2"."""
    return {name: replace(said.said[name], text=_text(name, said), place=None) for name in said.strategy}


def _text(name: str, said: Overrides) -> str:
    value, where = said.get(name), said.where(name)
    if said.is_in_file(name):
        return f"{where}: {name} {show(value)}"
    if where == "--qlora":  # which sets two fields
        return where
    flag = flag_of(name, value)
    return flag if isinstance(value, SWITCHED) else f"{flag} {show(value)}"


def _as_launched(script: ScriptFacts) -> ScriptFacts:
    """Return a script as hooks run it: save_pretrained() on all ranks gathers the weights of ZeRO-3."""
    calls = tuple(
        replace(call, is_gathered=True)
        if call.action is Action.SAVE_PRETRAINED and call.one_rank is None
        else call
        for call in script.calls
    )
    return replace(script, calls=calls)


def situation_of_launch(
    plan: Plan, *, machine: Machine | None, targets: Targets, said: Overrides = NOTHING_SAID
) -> Situation:
    """Return the situation of a plan that trains a script.

    Args:
        plan: the plan.
        machine: the node that runs it.
        targets: the script and its arguments; for a module instead of a script its facts are unknown.
        said: what the user set.
    """
    scripts, _ = read_scripts(targets)  # Python itself reports a script that it can't parse
    script = scripts[0] if scripts else None
    route = script.route if script else None
    trainer = trainer_of(script, route, targets)
    situation = situation_of_strategy(
        plan.strategy,
        topology=plan.topology,
        machine=machine,
        versions=plan.versions,
        own_optimizer=optimizer_of(None, trainer, script),
        typed=plan.typed_fields,
        script=script,
        said=said,
    )
    return replace(
        situation,
        route=route,
        trainer=trainer,
        checkpoint=targets.checkpoint,
        schemas=targets.schemas,
    )
