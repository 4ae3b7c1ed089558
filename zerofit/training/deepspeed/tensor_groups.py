"""Tensor-parallel groups: their ranks train on the same samples, which accelerate counts once per rank.

accelerate gives the ranks of a group the same batches (accelerate 1.15, data_loader.py, prepare_data_loader),
and everywhere else takes each rank for one with samples of its own: the scheduler steps once per rank,
gather_for_metrics() returns each sample once per rank, and a script that multiplies by num_processes counts
too many samples.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.deepspeed import takes_vocab_parallel_head, why_not_cut
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from types import FrameType, ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings

_LIBRARIES = (
    "accelerate",
    "deepspeed",
    "peft",
    "sentence_transformers",
    "torch",
    "transformers",
    "trl",
    "zerofit",
)
"""Packages that mean ranks where they read num_processes, and divide by the group's size themselves."""


def install(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Hook what an Accelerator says to a script, and the weights that it hands out to be saved."""
    size = settings.tensor_parallel_size
    if size == 1:
        return
    own = accelerator_class.num_processes

    def num_processes(self: Any) -> int:
        ranks: int = own.fget(self)
        return ranks // size if _is_script(_caller()) else ranks

    def gather(original: Any, self: Any, tensor: Any) -> Any:
        frame = _caller()
        gathered = original(self, tensor)
        for_metrics = frame is not None and frame.f_code.co_name == "gather_for_metrics"
        return _one_of_each_group(gathered, self, size) if for_metrics or _is_script(frame) else gathered

    def reduce(original: Any, self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        by_script = _is_script(_caller())
        reduced = original(self, tensor, reduction=reduction, scale=scale)
        return _divided(reduced, size) if by_script and reduction == "sum" else reduced

    def get_state_dict(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        state_dict = original(self, model, *args, **kwargs)
        _tie(state_dict, self.unwrap_model(model))
        return state_dict

    def prepare(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        for loader in args:
            _check_stream(loader, self, settings)
        models = [one for one in args if _is_model(one)]
        if not models:
            return original(self, *args, **kwargs)
        if takes_vocab_parallel_head():
            # Else the logits of a model with tied embeddings are a part of the vocabulary on each rank, and
            # what a script, generate() or compute_metrics does with them is wrong without an error.
            config = self.state.deepspeed_plugin.hf_ds_config.config
            config["tensor_parallel"]["vocab_parallel_lm_head"] = False
        for model in models:
            check_model(model, size=size)
            if _take_values_of_first_rank(model, self):
                changes.add(
                    "all ranks start with the weights of the first: they were made from other random numbers"
                )
        return original(self, *args, **kwargs)

    accelerator_class.num_processes = property(num_processes, doc=own.__doc__)
    wrap(accelerator_class, "gather", gather)
    wrap(accelerator_class, "reduce", reduce)
    wrap(accelerator_class, "get_state_dict", get_state_dict)
    wrap(accelerator_class, "prepare", prepare)
    changes.add(
        f"ranks train in groups of {size} on the same samples: accelerator.num_processes counts the groups, "
        "and gathered or summed values hold each group once"
    )


def install_in_accelerate(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Let gathered objects hold each group's once.

    Args:
        module: accelerate.accelerator, whose gather_for_metrics() gathers what is no tensor.
    """
    size = settings.tensor_parallel_size

    def gather_object(original: Any, object: Any) -> Any:  # noqa: A002 - accelerate's own name
        return [item for part in original([object])[::size] for item in part]

    if size > 1:
        wrap(module, "gather_object", gather_object)


def install_in_scheduler(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Let a prepared scheduler step once per group of ranks, which is once per batch of an optimizer step.

    Args:
        module: accelerate.scheduler, which asks AcceleratorState for nothing but the number of ranks.
    """
    if settings.tensor_parallel_size > 1:
        groups = SimpleNamespace(num_processes=settings.plan.topology.data_parallel_size)
        module.AcceleratorState = lambda: groups  # type: ignore[attr-defined]


def install_in_trainer(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Let a Trainer know how many ranks share its samples, as TrainingArguments.deepspeed tells it."""
    size = settings.tensor_parallel_size
    if size > 1 and hasattr(trainer_class, "get_tp_size"):
        wrap(trainer_class, "get_tp_size", lambda original, self: size)


def install_in_loading(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Let weights be loaded at stage 3: transformers refuses it beside tensor parallelism.

    Its reason is that ranks might already hold parts (transformers 5.23, integrations/deepspeed.py,
    _apply_weight_conversions_to_state_dict); DeepSpeed cuts the layers only as it makes the engine.

    Args:
        module: transformers.integrations.deepspeed.
    """

    def deepspeed_config(original: Any) -> Any:
        config = original()
        return config and {name: value for name, value in config.items() if name != "tensor_parallel"}

    if settings.tensor_parallel_size > 1:
        wrap(module, "deepspeed_config", deepspeed_config)


def check_model(model: Any, *, size: int) -> None:
    """Check that DeepSpeed can cut a model's layers for tensor parallelism, and that the parts stay alike.

    Args:
        model: what the script trains, whole.
        size: ranks of a group.

    Raises:
        UserError: it can't.
    """
    name = type(model).__name__
    if getattr(model, "peft_config", None):
        raise UserError(
            "tensor-parallel-adapters",
            "tensor parallelism can't cut layers with adapters",
            found=f"{name} over {size} tensor-parallel ranks",
            why="DeepSpeed cuts the layers around the adapters and then misses their parameters",
            fix="train without tensor parallelism, or without adapters",
            see="https://github.com/hiyouga/LLaMA-Factory/issues/8206",
        )
    if why := why_not_cut(model):
        raise UserError(
            "tensor-parallel-model",
            "DeepSpeed can't cut this model for tensor parallelism",
            found=f"{name} over {size} tensor-parallel ranks",
            why=why,
            fix="train without tensor parallelism; ZeRO-3 shards every model",
        )
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    dropout = getattr(text, "attention_dropout", 0)
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if dropout and heads and heads % size:
        raise UserError(
            "tensor-parallel-uneven-dropout",
            "ranks with other numbers of heads draw other random numbers",
            found=f"{heads} key-value heads over {size} ranks, attention_dropout={dropout}",
            why="from then on their random states differ, and so do their copies of what all ranks hold",
            fix=f"set attention_dropout to 0, or take a number of ranks that divides {heads}",
        )


def _check_stream(loader: Any, accelerator: Any, settings: AppliedSettings) -> None:
    """Check that accelerate does not hand one rank's batch of a stream to all groups.

    Its dispatcher takes one batch for all ranks where there is tensor parallelism, and its guard asks for a
    dimension of data parallelism that the mesh under DeepSpeed never has (accelerate 1.15, data_loader.py,
    DataLoaderDispatcher).

    Raises:
        UserError: it would.
    """
    from torch.utils.data import DataLoader, IterableDataset

    groups = settings.plan.topology.data_parallel_size
    if groups == 1 or not isinstance(loader, DataLoader):
        return
    dispatches = accelerator.dispatch_batches
    if dispatches or (dispatches is None and isinstance(loader.dataset, IterableDataset)):
        raise UserError(
            "tensor-parallel-dispatch",
            "all groups of ranks would train on the same samples",
            found=f"dispatch_batches={dispatches}, {groups} tensor-parallel groups, and a dataset of type "
            f"{type(loader.dataset).__name__}",
            why="accelerate then reads one batch and sends it to every rank",
            fix="say dispatch_batches=False, in DataLoaderConfiguration or in accelerator_config",
        )


def _is_model(one: Any) -> bool:
    from torch.nn import Module

    return isinstance(one, Module)


def _take_values_of_first_rank(model: Any, accelerator: Any) -> bool:
    """Let weights be those of the first rank, and return True if any were others.

    Without tensor parallelism DeepSpeed does it itself; with it, it only sends each part to the same part in
    other groups (deepspeed/runtime/engine.py, _broadcast_model). What zero.Init has partitioned is alike.
    """
    import torch
    from accelerate.utils.operations import broadcast, gather

    tensors = [one for one in model.state_dict(keep_vars=True).values() if not hasattr(one, "ds_id")]
    if not tensors:
        return False
    sums = torch.stack([one.detach().sum(dtype=torch.float64).cpu() for one in tensors])
    all_sums = gather(sums[None].to(accelerator.device))
    differing = (all_sums != all_sums[0]).any(0).tolist()
    for tensor in (one for one, differs in zip(tensors, differing, strict=True) if differs):
        with torch.no_grad():
            tensor.copy_(broadcast(tensor.detach().to(accelerator.device)))
    return any(differing)


def _caller() -> FrameType | None:
    """Return the frame that called into a hook."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) == "zerofit":
        frame = frame.f_back
    return frame


def _is_script(frame: FrameType | None) -> bool:
    return frame is not None and _package(frame) not in _LIBRARIES


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _one_of_each_group(gathered: Any, accelerator: Any, size: int) -> Any:
    """Return values gathered over all ranks, in the order of ranks, with one rank of each group."""
    from accelerate.utils.operations import recursively_apply

    ranks = accelerator.state.num_processes

    def first(tensor: Any) -> Any:
        return tensor.unflatten(0, (ranks, len(tensor) // ranks))[::size].flatten(0, 1)

    return recursively_apply(first, gathered)


def _divided(summed: Any, size: int) -> Any:
    from accelerate.utils.operations import recursively_apply

    return recursively_apply(
        lambda tensor: tensor / size if tensor.is_floating_point() else tensor // size, summed
    )


def _tie(state_dict: Any, model: Any) -> None:
    """Let tied weights be one tensor again, which save_pretrained() writes once.

    DeepSpeed gathers each of their names into a tensor of its own (runtime/engine.py,
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
