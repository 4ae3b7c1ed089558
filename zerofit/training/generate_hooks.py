"""Keeps model.generate from blocking ranks under ZeRO-3 and FSDP2: calls run in step, or raise an error."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.fsdp2 import has_shards
from zerofit.generation.gathering import has_hooks, is_available, partitioned_parameters
from zerofit.generation.lockstep import OUT_OF_STEP, check_experts, goes_out_of_step
from zerofit.ranks.exchange import all_ranks
from zerofit.ranks.meeting import arranged, is_arranged, meet
from zerofit.ranks.script_line import script_line

if TYPE_CHECKING:
    from inspect import BoundArguments
    from types import ModuleType

    from zerofit.training.changes import Changes

_NAME = "model.generate"
_SEE = "https://huggingface.co/docs/transformers/generation_strategies"


def install(module: ModuleType, changes: Changes, *, limit_s: float) -> None:
    """Hook model.generate of all transformers models.

    Args:
        module: transformers.generation.utils.
        changes: receives corrected calls.
        limit_s: how long a rank waits for the others before a call; 0 does not wait.
    """
    original = module.GenerationMixin.generate
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_arranged() or not all_ranks().are_many or _belongs_to_hybrid_engine(self):
            return original(self, *args, **kwargs)
        call = signature.bind(self, *args, **kwargs)
        said = call.arguments.get("synced_gpus")
        by_itself = said is None and module.is_deepspeed_zero3_enabled()
        needs_others = needs_all_ranks(self)
        if not (needs_others or said or by_itself):
            return original(self, *args, **kwargs)
        line = script_line()
        if needs_others:
            engine = "FSDP2" if has_shards(self) else "ZeRO-3"
            _check_even(call, line, engine)
            if engine == "ZeRO-3":  # FSDP2 gathers a block's experts together
                check_experts(self, found_at=f"{line}: ")
            if not (said or by_itself):
                changes.add(_note(line, said, engine))
            call.arguments["synced_gpus"] = True
        meet(_NAME, line=line, limit_s=limit_s)
        with (
            arranged()
        ):  # for models that the call itself generates with: a draft model, a retriever's generator
            return original(*call.args, **call.kwargs)

    module.GenerationMixin.generate = generate


def needs_all_ranks(model: Any) -> bool:
    """Return True if a model's forward passes need all ranks: FSDP2 or ZeRO-3 shards it, or has its hooks.

    Weights gathered by the script are released by the hooks in the first pass, unless it has removed them.
    Groups of fewer ranks (such as MiCS) are not covered: synced_gpus asks all ranks.
    """
    from torch.distributed import get_world_size

    if has_shards(model):
        return True
    parameters = partitioned_parameters(model)
    if not parameters or get_world_size(parameters[0].ds_process_group) != get_world_size():
        return False
    return not all(map(is_available, parameters)) or has_hooks(model)


def _belongs_to_hybrid_engine(model: Any) -> bool:
    """Return True if DeepSpeed's RLHF engine has replaced generate (hybrid_engine.py)."""
    owner = getattr(vars(model).get("generate"), "__self__", None)
    return type(owner).__name__ == "DeepSpeedHybridEngine"


def _note(line: str, said: bool | None, engine: str) -> str:
    call = "generate()" if said is None else f"generate(synced_gpus={said})"
    return f"{line}: {call} under {engine} would leave ranks waiting for longer completions: synced_gpus=True"


def _check_even(call: BoundArguments, line: str, engine: str) -> None:
    """Refuse settings with which ranks get out of step."""
    for name, why in OUT_OF_STEP.items():
        value = _setting(call, name)
        if not goes_out_of_step(name, value):
            continue
        shown = value if isinstance(value, int | float | str) else type(value).__name__
        raise UserError(
            "generate-passes-differ",
            f"{name} can't be used on a model that {engine} partitions",
            found=f"{line}: generate({name}={shown})",
            why=f"{why}, so that ranks make different numbers of passes, and each pass needs all ranks",
            fix=f"leave out {name}, or generate without {engine}",
            see=_SEE,
        )


def _setting(call: BoundArguments, name: str) -> Any:
    """Return a setting of the call, else of its generation_config, else of the model's."""
    arguments = call.arguments
    direct = arguments.get(name, arguments.get("kwargs", {}).get(name))
    configs = (arguments.get("generation_config"), getattr(arguments["self"], "generation_config", None))
    values = (direct, *(getattr(config, name, None) for config in configs))
    return next((value for value in values if value is not None), None)
