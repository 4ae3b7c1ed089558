"""Finishes a capture: collects the hooks' observations into one value."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from zerofit.core.capture import Capture
from zerofit.core.command import Route
from zerofit.core.optimizers.lookup import trainer_names_of_types
from zerofit.core.upstream.accelerate import prepared_models, prepared_optimizers, prepared_schedulers
from zerofit.core.upstream.torch import accumulated_hooks
from zerofit.core.upstream.transformers import COUNTS_ITEMS, TRAINER_LOOP
from zerofit.models.pieces import Inputs, batch_of
from zerofit.models.trace.live_batch import rows_per_sample
from zerofit.models.trace.script_loss import ScriptLoss
from zerofit.scripts.capture.child import batches as reading
from zerofit.scripts.capture.child import gpu_stand_in
from zerofit.scripts.capture.child.evaluation import Evaluated, evaluated_by
from zerofit.scripts.capture.child.forward_on_meta import forward_on_meta
from zerofit.scripts.capture.child.loop_length import captured_loop
from zerofit.scripts.capture.child.model_record import (
    averaging_class,
    base_of,
    captured_model,
    class_path,
    other_weight_bytes,
    padding_of,
    unprepared_models,
)
from zerofit.scripts.capture.child.observations import Live
from zerofit.scripts.capture.child.outcome import exit_captured, exit_failed, needs_values, place_in_script
from zerofit.scripts.capture.child.script_source import (
    called_methods,
    edits_by_hand,
    manual_accumulation,
    own_sources,
)
from zerofit.scripts.capture.child.training_record import (
    captured_loader,
    captured_optimizers,
    captured_schedulers,
    json_value,
)

if TYPE_CHECKING:
    from types import FrameType

    from zerofit.core.capture import CapturedLoader
    from zerofit.scripts.capture.child.observations import Observations

_LOOP = (
    "compute_loss",
    "create_optimizer",
    "create_optimizer_and_scheduler",
    "create_scheduler",
    "get_batch_samples",
    "get_train_dataloader",
    "prediction_step",
    "train",
    "training_step",
    *(*TRAINER_LOOP, COUNTS_ITEMS),
)
"""Methods of Trainer's loop (transformers 5.23, trainer.py)."""


Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a forward pass: positional, and by name."""


def finish(seen: Observations, accelerator: Any, model: Any, batch: Arguments | None) -> NoReturn:
    """Write the capture and end the process.

    Args:
        seen: the capture.
        accelerator: of the model.
        model: as called by the script, prepared.
        batch: arguments of the forward pass; None uses the DataLoader's first batch.
    """
    try:
        frame = sys._getframe(1)
        seen.on_failure = None  # from here on a failure is the capture's
        seen.is_ending = True
        found = _found(seen, accelerator, model, batch, frame)
        evaluated = None if found.trainer is None else evaluated_by(found.trainer, seen)
        capture = _capture(seen, found, evaluated)
        live = Live(
            model=found.model,
            batch=found.batch,
            capture=capture,
            loss=_script_loss(found),
            inputs=found.inputs,
            evaluated=None if evaluated is None else evaluated.inputs,
            trainer=found.trainer,
        )
        exit_captured(seen, live)
    except BaseException as error:  # the script must not continue: an except clause could start training
        _exit_broken(seen, error)


def _exit_broken(seen: Observations, error: BaseException) -> NoReturn:
    try:
        kind = "needs-values" if needs_values(seen, error) else "raised"
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        where = place_in_script(error.__traceback__) or place_in_script(sys._getframe(2))
        exit_failed(seen, kind, said[:300], where=where, error=error)
    finally:
        os._exit(1)  # not even the folder is writable


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The call where training would begin."""

    accelerator: Any
    trainer: Any
    """None in a custom loop."""
    model: Any
    """Unwrapped."""
    loader: Any
    """The DataLoader of the training loop, or None."""
    captured_loader: CapturedLoader | None
    """The same, before its batches were read."""
    batch: Arguments
    """Of the first forward pass."""
    inputs: Any
    """The DataLoader's first batch; None if none was read."""
    more: list[Any]
    """The following batches."""
    frame: FrameType
    """Of the caller of finish()."""


def _found(
    seen: Observations, accelerator: Any, model: Any, batch: Arguments | None, frame: FrameType
) -> _Found:
    trainers = (made for made in seen.trainers if getattr(made, "accelerator", None) is accelerator)
    trainer = next(trainers, None)
    loader = _loader(seen, accelerator, trainer)
    own_loader = captured_loader(loader) if loader is not None else None
    read: list[Any] = []
    if loader is not None:
        read = reading.first_batches(loader, seen.spec.num_batches, seen.note, needs_one=batch is None)
    return _Found(
        accelerator=accelerator,
        trainer=trainer,
        model=accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False),
        loader=loader,
        captured_loader=own_loader,
        batch=batch if batch is not None else _as_arguments(read[0] if read else {}),
        inputs=read[0] if read else None,
        more=read[1:],
        frame=frame,
    )


def _script_loss(found: _Found) -> ScriptLoss | None:
    """Return the Trainer's loss if it differs from the model's output."""
    trainer = found.trainer
    if trainer is None or found.inputs is None:
        return None
    is_own = "compute_loss" in _overrides(trainer)
    if not is_own and trainer.label_smoother is None and trainer.compute_loss_func is None:
        return None
    return ScriptLoss(trainer=trainer, model=found.model)


def _as_arguments(batch: Any) -> Arguments:
    if hasattr(batch, "items"):
        return (), dict(batch.items())
    return (tuple(batch), {}) if isinstance(batch, (list, tuple)) else ((batch,), {})


def _loader(seen: Observations, accelerator: Any, trainer: Any) -> Any:
    active = accelerator.gradient_state.active_dataloader
    if active is not None and hasattr(active, "dataset"):
        return active
    handler = getattr(trainer, "callback_handler", None)
    return getattr(handler, "train_dataloader", None) or seen.loader


def _capture(seen: Observations, found: _Found, evaluated: Evaluated | None) -> Capture:
    accelerator, trainer, model = found.accelerator, found.trainer, found.model
    padding = padding_of(model)
    given = reading.nested(*found.batch)
    batches = tuple(reading.captured_batch(events, padding=padding) for events in (given, *found.more))
    arguments = _arguments(trainer)
    deepspeed = _deepspeed_config(arguments)
    sources = own_sources()
    edits = edits_by_hand(sources)
    calls = called_methods(sources.values())
    shown = forward_on_meta(model, found.batch)
    manual = manual_accumulation(seen, sources.values(), found.frame) if trainer is None else None
    prepared = {
        id(own): own
        for each in seen.accelerators
        for own in (getattr(optimizer, "optimizer", optimizer) for optimizer in prepared_optimizers(each))
    }
    scheduled = {
        id(getattr(scheduler, "scheduler", scheduler))
        for each in seen.accelerators
        for scheduler in prepared_schedulers(each)
    }
    if trainer is not None:
        scheduled.add(id(getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)))
    rows = reading.num_samples(given) or len(batches[0].lengths) or None
    micro_batch_size, rows_of_one = _micro_batch(arguments, found.captured_loader, rows)
    accumulated = int(arguments.get("gradient_accumulation_steps") or accelerator.gradient_accumulation_steps)
    return Capture(
        target=seen.target,
        route=Route.ACCELERATE if trainer is None else Route.TRAINER,
        stopped_at=place_in_script(found.frame),
        model=captured_model(
            model,
            passes_num_items=_passes(seen, trainer, shown.passes_num_items),
            quantized=seen.quantized,
            shows_loading=seen.spec.weights == "meta",
        ),
        optimizers=captured_optimizers(seen.optimizers(), prepared),
        schedulers=captured_schedulers(
            seen.schedulers(), scheduled, num_steps=_positive(trainer and trainer.state.max_steps)
        ),
        loader=found.captured_loader,
        loop=captured_loop(sources, found.frame, passes_per_step=accumulated * (manual or 1))
        if trainer is None
        else None,
        steps_done=int(trainer.state.global_step) if trainer is not None else 0,
        batches=batches,
        lengths=reading.captured_lengths(found.loader, batches, most=_positive(arguments.get("max_length"))),
        micro_batch_size=micro_batch_size,
        rows_per_sample=rows_of_one,
        gradient_accumulation_steps=accumulated,
        whole_because=_why_whole(found, shown.draws),
        splits_batches=bool(accelerator.split_batches),
        accumulates=seen.accumulates,
        accumulates_by_hand=manual,
        mixed_precision=str(accelerator.mixed_precision),
        names_precision=_names_precision(accelerator, trainer),
        engine=_engine(arguments, deepspeed) or getattr(accelerator, "_zerofit_engine", ""),
        made_by_engine=_made_by_engine(deepspeed or {}),
        asks_for_cpu=bool(arguments.get("use_cpu") or getattr(accelerator, "_zerofit_asks_for_cpu", False)),
        max_grad_norm=arguments.get("max_grad_norm"),
        seed=_seed(seen, arguments),
        num_models=max(1, len({id(member) for member in prepared_models(accelerator)})),
        unprepared_models=()
        if trainer is not None
        else unprepared_models(model, prepared_models(accelerator)),
        averages=averaging_class(model),
        uses_local_sgd=seen.uses_local_sgd,
        edits_gradients=edits.gradients,
        edits_weights=edits.weights,
        hooks_gradients=_hooks_gradients(model),
        other_weight_bytes=other_weight_bytes(model),
        trainer_class=class_path(type(trainer)) if trainer is not None else "",
        trainer_arguments=arguments,
        trainer_overrides=_overrides(trainer),
        evaluates=calls.evaluates or getattr(trainer, "eval_dataset", None) is not None,
        evaluation=None if evaluated is None else evaluated.captured,
        generates=calls.generates or bool(arguments.get("predict_with_generate")),
        saves=calls.saves or seen.saves or str(arguments.get("save_strategy", "no")) != "no",
        told_gpus=gpu_stand_in.shown_gpus(seen),
        notes=tuple(seen.notes),
        wall_time_s=time.monotonic() - seen.started,
        peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _arguments(trainer: Any) -> dict[str, Any]:
    """Return the fields of TrainingArguments that are JSON values, as the script set them."""
    if trainer is None:
        return {}
    said = {**trainer.args.to_dict(), **getattr(trainer.args, "_zerofit_said", {})}
    values = {name: value if isinstance(value, dict) else json_value(value) for name, value in said.items()}
    return {name: value for name, value in values.items() if value is not None}


def _engine(arguments: dict[str, Any], deepspeed: dict[str, Any] | None) -> str:
    """Return the engine that TrainingArguments configure; empty for plain PyTorch."""
    if arguments.get("fsdp"):
        return "FSDP"
    if not arguments.get("deepspeed"):
        return ""
    if deepspeed is None:
        return "DeepSpeed"
    return f"DeepSpeed ZeRO-{_section(deepspeed, 'zero_optimization').get('stage', 0)}"


def _deepspeed_config(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration of TrainingArguments; None if there is none, or it can't be read."""
    config = arguments.get("deepspeed")
    if config and not isinstance(config, dict):
        try:
            config = json.loads(Path(str(config)).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
    return config if isinstance(config, dict) else None


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _made_by_engine(config: dict[str, Any]) -> tuple[str, ...]:
    kind = str(_section(config, "optimizer").get("type", "adamw"))
    own_optimizer = () if kind.lower() in trainer_names_of_types() else ("optimizer",)
    return (*own_optimizer, *(("scheduler",) if _section(config, "scheduler") else ()))


def _names_precision(accelerator: Any, trainer: Any) -> bool:
    """Return True if the script itself sets its mixed precision, even to "no"."""
    if trainer is None:
        return getattr(accelerator, "_zerofit_names_precision", False)
    return not {"bf16", "fp16"}.isdisjoint(getattr(trainer.args, "_zerofit_given", ()))


_LOOKING = ("wandb",)
"""Packages whose hooks on gradients only look at them."""


def _hooks_gradients(model: Any) -> bool:
    """Return True if the script has put hooks on gradients, which may change them."""
    hooks = (
        hook
        for parameter in model.parameters()
        for hook in (*(parameter._backward_hooks or {}).values(), *accumulated_hooks(parameter))
    )
    return any(not str(getattr(hook, "__module__", "")).startswith(_LOOKING) for hook in hooks)


def _why_whole(found: _Found, draws: tuple[str, ...]) -> str:
    """Return why the forward pass can't be split; empty if nothing forbids it."""
    name = class_path(type(base_of(found.model))).rpartition(".")[2]
    if _hooks_gradients(found.model):
        return "the script has hooks on gradients, which would act on those of parts"
    if draws:
        drawn = f"draws random numbers ({', '.join(draws)})"
        return f"the forward pass of {name} {drawn}, which would differ in parts"
    because = batch_of(Inputs(args=found.batch[0], kwargs=found.batch[1])).whole_because
    return f"in the inputs of {name}, {because}" if because else ""


def _passes(seen: Observations, trainer: Any, answer: bool | None) -> bool:
    """Return True if the training loss is divided by num_items_in_batch."""
    if trainer is not None and (trainer.label_smoother is not None or trainer.compute_loss_func is not None):
        seen.note("the loss is computed outside of the model: whether the model scales it is not checked")
        return False
    if answer is None:
        seen.note("whether the model divides its loss by num_items_in_batch is unknown: assumed not")
    return bool(answer)


def _positive(number: Any) -> int | None:
    return number if isinstance(number, int) and number > 0 else None


def _micro_batch(arguments: dict[str, Any], loader: Any, rows: int | None) -> tuple[int | None, int]:
    """Return the samples per forward pass, and the rows per sample in the model's batch.

    The arguments or the DataLoader take precedence over the model's inputs: a dataset smaller than a batch
    gives fewer, and a collator may make several rows per sample.
    """
    said = arguments.get("per_device_train_batch_size") or (loader.batch_size if loader is not None else None)
    if said is None or rows is None:
        return rows if said is None else said, 1
    if (each := rows_per_sample(rows, said)) > 1:
        return said, each
    is_short = loader is not None and loader.num_samples is not None and loader.num_samples < said
    return (said if is_short or "per_device_train_batch_size" in arguments else rows), 1


def _seed(seen: Observations, arguments: dict[str, Any]) -> int | None:
    import torch

    if "seed" in arguments:
        return int(arguments["seed"])
    seed = int(torch.initial_seed())
    return None if seed == seen.default_seed else seed


def _overrides(trainer: Any) -> tuple[str, ...]:
    """Return the methods of a Trainer's loop that are overridden."""
    if trainer is None:
        return ()
    found = []
    for name in _LOOP:
        function = getattr(type(trainer), name, None)
        module = getattr(function, "__module__", "") or ""
        if function is not None and module.partition(".")[0] not in ("transformers", "zerofit"):
            found.append(name)
    return tuple(found)
