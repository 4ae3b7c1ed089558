"""Replaces the script's optimizer by the plan's, and refuses one that offload would break."""

from __future__ import annotations

import gc
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules.optimizer.rules import RULES as OPTIMIZER_RULES
from zerofit.core.errors import UserError
from zerofit.core.optimizers.lookup import REPLACEMENTS, optimizer_class, optimizer_of_class
from zerofit.core.optimizers.table import NOT_TAKEN_OVER
from zerofit.core.setting import Said
from zerofit.core.strategy import OptimizerName
from zerofit.core.upstream.accelerate import prepared_optimizers
from zerofit.core.upstream.torch import move_step_hooks
from zerofit.models.element_wise import try_element_wise
from zerofit.training.setup.optimizer_kinds import is_lion, make, rate_advice
from zerofit.training.step.schedulers import lead_schedulers, live_objects

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.core.plan import Plan
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_KEPT = frozenset({"params", "lr", "initial_lr", "weight_decay"})
"""Keys of a parameter group that mean the same to every optimizer, and to schedulers."""
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that select an implementation, without effect on the result."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Prepare the plan's optimizer in place of the script's."""
    name = settings.strategy.optimizer
    if name is None:
        return {}

    def prepare(original: Any, self: Any, *objects: Any, **kwargs: Any) -> Any:
        if self._zerofit_by_script:
            objects = _with_swapped(self, objects, name, changes)
        if name is OptimizerName.SGD:
            _step_one_by_one(objects)
        if name is OptimizerName.ADAMW:
            _stay_fused(objects)
        return original(self, *objects, **kwargs)

    return {"prepare": prepare, "prepare_optimizer": prepare}


def _step_one_by_one(objects: Iterable[Any]) -> None:
    """Disable foreach in SGD, including Trainer's.

    With weight decay, foreach copies all gradients at once (torch/optim/sgd.py, _multi_tensor_sgd), which
    needs more memory than a step of AdamW, which SGD was to save.
    """
    import torch

    for optimizer in objects:
        if isinstance(optimizer, torch.optim.SGD):
            for group in optimizer.param_groups:
                group["foreach"] = False


def _stay_fused(objects: Iterable[Any]) -> None:
    """Keep AdamW fused, including Trainer's, when it loads a checkpoint of the script's own AdamW.

    torch loads the groups' options from the checkpoint, and only moves step counters to the GPU for fused
    ones (torch/optim/optimizer.py, _process_value_according_to_param_policy).
    """
    import torch

    def keep(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        switches = {key: optimizer.defaults[key] for key in ("fused", "foreach")}
        return {**state, "param_groups": [{**group, **switches} for group in state["param_groups"]]}

    for optimizer in objects:
        if isinstance(optimizer, torch.optim.AdamW):
            optimizer.register_load_state_dict_pre_hook(keep)


def check_wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Refuse an optimizer that offload would break in prepare(), which Trainer calls, too.

    The checks before the launch only know the script's source.
    """
    if not (settings.uses_deepspeed and settings.plan.is_checked):
        return {}

    def prepare(original: Any, self: Any, *objects: Any, **kwargs: Any) -> Any:
        from torch.optim import Optimizer

        for optimizer in objects:
            if isinstance(optimizer, Optimizer):
                _check_optimizer(optimizer, settings.plan, changes)
                if is_plain_optimizer(optimizer) and settings.strategy.zero_stage:
                    _check_element_wise(optimizer, changes)
        return original(self, *objects, **kwargs)

    return {"prepare": prepare}


def _check_element_wise(optimizer: Any, changes: Changes) -> None:
    """Refuse an optimizer that looks at whole tensors, which ZeRO joins and cuts."""
    tried = try_element_wise(optimizer)
    if tried.is_kept is None:
        changes.warn(
            f"zerofit: whether {tried.name} steps each element by itself, as ZeRO needs, is not known: "
            f"{tried.found}"
        )
    elif not tried.is_kept:
        raise UserError(
            "optimizer-not-element-wise",
            "the script's optimizer would train differently under ZeRO",
            found=f"{tried.name}: {tried.found}",
            why="ZeRO steps flat buffers of many parameters, cut over the ranks; an optimizer that looks at "
            "single tensors (their norms, shapes or names) or exchanges the weights trains otherwise",
            fix="train without ZeRO: --engine native; or use an optimizer that steps each element by itself, "
            "such as AdamW",
        )


def _check_optimizer(optimizer: Any, plan: Plan, changes: Changes) -> None:
    path = optimizer_class(optimizer)
    name = path.rpartition(".")[2]
    situation = situation_of_strategy(
        plan.strategy, topology=plan.topology, versions=plan.versions, typed=plan.typed_fields
    )
    said = Said(value=optimizer_of_class(path), text=f"the script's {name}")
    situation = replace(situation, settings=replace(situation.settings, optimizer=said))
    verdict = check(situation, rules=OPTIMIZER_RULES)
    for finding in verdict.of(Severity.WARNING):
        changes.warn(finding.as_text())
    for finding in verdict.of(Severity.ERROR):
        raise finding.as_error()


def _with_swapped(
    accelerator: Any, objects: tuple[Any, ...], name: OptimizerName, changes: Changes
) -> tuple[Any, ...]:
    """Return the objects that a script prepares, with its only optimizer replaced."""
    import torch

    own = [item for item in objects if is_plain_optimizer(item) and not hasattr(item, "_zerofit_swapped")]
    if not own:
        return objects
    gc.collect()  # so that discarded optimizers are not counted
    num_optimizers = sum(not hasattr(item, "_zerofit_swapped") for item in live_optimizers())
    why_not = None
    if num_optimizers + len(prepared_optimizers(accelerator)) > 1:
        why_not = "the script has several, and each would need its own"
    elif own[0].state:
        why_not = "it has made steps already"
    if why_not:
        changes.add(f"the script's optimizers stay; {name} does not take their place: {why_not}")
        return objects
    embeddings = live_objects(torch.nn.Embedding)  # the optimizer may come without its model
    new = swap_and_note(own[0], name, changes, modules=embeddings, said="the script says")
    return tuple(new if item is own[0] else item for item in objects)


def swap_and_note(
    optimizer: Any, name: OptimizerName, changes: Changes, *, modules: Iterable[Any], said: str
) -> Any:
    """Replace an optimizer, and report it; `said` precedes the old one's name: "the script says"."""
    lost = dropped(optimizer, name)
    new = swap(optimizer, name, modules=modules)
    if new is not optimizer:
        without = f"; {lost} of the script's has no place in it" if lost else ""
        changes.add(f"the optimizer is {_said(new)}; {said} {_said(optimizer)}{without}")
        rate = new.param_groups[0].get("initial_lr", new.param_groups[0]["lr"])
        if (advice := rate_advice(type(optimizer).__name__, type(new).__name__, rate)) is not None:
            changes.add(advice)
    return new


def swap(optimizer: Any, name: OptimizerName, *, modules: Iterable[Any] = ()) -> Any:
    """Return a new optimizer on the parameter groups of another, and move its schedulers to the new one.

    The groups are the same dicts, which schedulers and scripts reference, with the learning rate, the weight
    decay and other settings that both share.

    Args:
        optimizer: a torch.optim.Optimizer without steps so far.
        name: the kind of the new one; an optimizer of that kind is returned unchanged.
        modules: the model's: with 8 bits, embeddings among them keep 32-bit states.
    """
    if is_alike(optimizer, name):
        return optimizer
    if any(group["lr"] is None for group in optimizer.param_groups):
        raise _has_no_rate(optimizer, name)
    for switch in NOT_TAKEN_OVER:
        if any(group.get(switch) for group in optimizer.param_groups):
            raise _not_taken_over(optimizer, switch, name)
    kept = _KEPT | _kept_by(optimizer, name)
    stale = optimizer.defaults.keys() - kept
    for group in optimizer.param_groups:
        for key in stale & group.keys():
            del group[key]
        for key in ("betas", "eps"):
            if key in group and not _fits_adam(key, group[key]):
                del group[key]
    new = make(name, optimizer.param_groups, modules)
    move_step_hooks(optimizer, new)
    new._zerofit_swapped = optimizer._zerofit_swapped = True
    lead_schedulers(optimizer, new)
    return new


def is_alike(optimizer: Any, name: OptimizerName) -> bool:
    """Return True if an optimizer already is of a kind, and can stay."""
    return REPLACEMENTS[name].is_alike(optimizer)


def dropped(optimizer: Any, name: OptimizerName) -> str:
    """Return the script's settings of its optimizer that another kind does not support: "momentum=0.9"."""
    defaults = inspect.signature(type(optimizer)).parameters
    kept = _KEPT | _kept_by(optimizer, name) | _IMPLEMENTATION
    said = {
        f"{key}={group[key]}": None
        for group in optimizer.param_groups
        for key in optimizer.defaults
        if key not in kept and key in group and key in defaults and group[key] != defaults[key].default
    }
    return ", ".join(said)


def _kept_by(optimizer: Any, name: OptimizerName) -> frozenset[str]:
    """Return the settings that mean the same to the new one: betas are not shared between Lion and AdamW."""
    keeps = REPLACEMENTS[name].keeps
    return keeps if is_lion(optimizer) == is_lion(name.value) else keeps - {"betas"}


def _not_taken_over(optimizer: Any, switch: str, name: OptimizerName) -> UserError:
    return UserError(
        "optimizer-switch-not-taken-over",
        f"{name} does not support an option of the script's optimizer",
        found=f"{type(optimizer).__name__}({switch}=True), to be replaced by {name}",
        why=f"other optimizers have no {switch}, without which the script would train differently",
        fix=f"keep the script's optimizer, or remove {switch} from the script",
    )


def _has_no_rate(optimizer: Any, name: OptimizerName) -> UserError:
    return UserError(
        "optimizer-without-rate",
        f"{name} needs a learning rate, and the script gives none",
        found=f"{type(optimizer).__name__}(lr=None), to be replaced by {name}",
        why="an optimizer that computes its own learning rate has none to pass on",
        fix="give the script's optimizer a learning rate, or keep it",
    )


def _fits_adam(key: str, value: Any) -> bool:
    if key == "eps":
        return isinstance(value, float)  # Adafactor has two
    return isinstance(value, tuple | list) and len(value) == 2


def is_plain_optimizer(item: Any) -> bool:
    """Return True for an optimizer as created by scripts, without wrappers."""
    from torch.optim import Optimizer

    return issubclass(type(item), Optimizer) and type(item).__module__.split(".")[0] != "accelerate"


def live_optimizers() -> list[Any]:
    """Return all optimizers in the process, as created by scripts."""
    from torch.optim import Optimizer

    return [item for item in live_objects(Optimizer) if is_plain_optimizer(item)]


def _said(optimizer: Any) -> str:
    return f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__}"
