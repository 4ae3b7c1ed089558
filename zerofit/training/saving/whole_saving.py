"""save_pretrained() and save_model() under ZeRO-3 and FSDP2: all ranks gather weights, rank 0 writes them.

Otherwise ZeRO-3 would write placeholders of shape (0,), FSDP2 a rank's shards or a tied weight twice, and
Trainer nothing where checkpoints are sharded.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.strategy import ZeroStage
from zerofit.core.upstream.fsdp2 import has_shards, is_shard, whole_tensor
from zerofit.generation.gathering import each_whole, missing_bytes
from zerofit.ranks.meeting import Advice, meet
from zerofit.ranks.script_line import script_line
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_SAVING = Advice(
    rule="zero3-saves-on-all-ranks",
    why="each rank only holds a part of each weight, and rank 0 gathers them from all",
    fix="call it on all ranks, outside of `if accelerator.is_main_process`; rank 0 alone writes",
)


def install(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Hook save_pretrained() of transformers' models.

    Args:
        module: transformers.modeling_utils.
    """
    _hook(module.PreTrainedModel, settings, changes)


def install_in_peft(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Hook save_pretrained() of models with peft's adapters.

    Args:
        module: peft.peft_model.
    """
    _hook(module.PeftModel, settings, changes)


def install_in_torch(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Refuse torch.save() of FSDP2's shards: what one rank saves is its own part, and the rest is lost.

    Args:
        module: torch.serialization.
    """

    def save(original: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        if any(map(is_shard, _members(value))):
            raise _saves_shards(script_line())
        original(value, *args, **kwargs)

    if settings.uses_fsdp2:
        wrap(module, "save", save)


def _members(value: Any, depth: int = 4) -> Iterator[Any]:
    """Yield the members of nested containers, such as a state dict in a dict of a script."""
    if isinstance(value, Mapping | list | tuple) and depth:
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from _members(member, depth - 1)
    else:
        yield value


def _saves_shards(line: str) -> UserError:
    return UserError(
        "saves-shards",
        "the script saves shards of FSDP2 in place of whole weights",
        found=f"{line}: torch.save() of DTensors, as state_dict() returns them",
        why="each rank holds a part of each weight, and the file would have that of one rank",
        fix="call accelerator.get_state_dict(model) on all ranks and save what it returns on the main one, "
        "or accelerator.save_state(), or model.save_pretrained()",
        see="https://huggingface.co/docs/accelerate/usage_guides/fsdp#saving-and-loading",
    )


def _hook(model_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    if settings.strategy.zero_stage is not ZeroStage.PARAMETERS and not settings.uses_fsdp2:
        return
    signature = inspect.signature(model_class.save_pretrained)
    engine = "FSDP2" if settings.uses_fsdp2 else "ZeRO-3"

    def save_pretrained(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        given = signature.bind(self, *args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        # accelerator.get_state_dict() returns the weights on rank 0, and None on others.
        if "state_dict" in given or not (has_shards(self) if settings.uses_fsdp2 else missing_bytes(self)):
            return original(self, *args, **kwargs)
        line = script_line()
        advice = replace(_SAVING, rule="fsdp2-saves-on-all-ranks") if settings.uses_fsdp2 else _SAVING
        meet("model.save_pretrained", line=line, limit_s=settings.plan.generate_limit_s, advice=advice)
        changes.add(
            f"{line}: save_pretrained() gathers the weights that {engine} partitions; rank 0 writes them"
        )
        is_writer = torch.distributed.get_rank() == 0
        weights = _weights(self, keeps=is_writer)
        return original(self, *args, **{**kwargs, "state_dict": weights}) if is_writer else None

    wrap(model_class, "save_pretrained", save_pretrained)


def _weights(model: Any, *, keeps: bool) -> dict[str, Any]:
    """Return the state of a model in host memory; a collective.

    Of a model with adapters, the frozen base is not gathered, except for embeddings, which peft may save too.

    Args:
        keeps: False on ranks that only take part in gathering.
    """
    import torch

    state = model.state_dict(keep_vars=True)
    adapters = getattr(model, "peft_config", None)
    saved = {
        id(value)
        for name, value in state.items()
        if not adapters
        or getattr(value, "requires_grad", False)  # an extra state is no tensor
        or "lm_head" in name
        or not adapters.keys().isdisjoint(name.split("."))
    }
    saved |= {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    if has_shards(model):
        whole = {
            id(value): copied
            for value in {id(value): value for value in state.values() if id(value) in saved}.values()
            if (copied := whole_tensor(value, keeps=keeps)) is not None
        }
        rest = {name: value for name, value in state.items() if id(value) in whole or not is_shard(value)}
        return {name: whole.get(id(value), value) for name, value in rest.items()}
    whole = {
        id(parameter): parameter.detach().to("cpu", copy=True)
        for parameter in each_whole(model)
        if keeps and id(parameter) in saved
    }
    return {name: whole.get(id(value), value) for name, value in state.items()}


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Let get_state_dict() return a tied weight as one tensor under all its names, as one process does."""
    if not settings.uses_fsdp2 and settings.sample_group_size == 1:
        return {}

    def get_state_dict(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        state_dict = original(self, model, *args, **kwargs)
        tie(state_dict, self.unwrap_model(model))
        return state_dict

    return {"get_state_dict": get_state_dict}


def tie(state_dict: Any, model: Any) -> None:
    """Make tied weights a single tensor again, which save_pretrained() writes once.

    FSDP2 and tensor parallelism gather each of their names into a separate tensor
    (torch/distributed/_state_dict_utils.py, 2.13; deepspeed/runtime/engine.py,
    _replace_module_consolidated_state_dict, 0.19.8).
    """
    if not state_dict:
        return  # on all ranks but the first
    names = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for first, *others in names.values():
        for other in others:
            if first in state_dict and other in state_dict:
                state_dict[other] = state_dict[first]


def trainer_wrappers(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Let Trainer.save_model() write whole weights, also where checkpoints are sharded.

    Trainer writes none then (transformers/trainer.py, save_model, 5.23). Checkpoints, which call it too,
    stay sharded.
    """
    if not settings.uses_fsdp2:
        return {}

    def save_model(
        original: Any, self: Any, output_dir: Any = None, _internal_call: bool = False, **kwargs: Any
    ) -> Any:
        plugin = self.accelerator.state.fsdp_plugin
        before = plugin.state_dict_type
        if not _internal_call:
            plugin.state_dict_type = type(before).FULL_STATE_DICT
        try:
            return original(self, output_dir, _internal_call, **kwargs)
        finally:
            plugin.state_dict_type = before

    return {"save_model": save_model}
