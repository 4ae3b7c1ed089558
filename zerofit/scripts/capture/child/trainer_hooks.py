"""Hooks on transformers' Trainer and TrainingArguments, up to the Trainer's first forward pass."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from zerofit.scripts.capture.child.outcome import exit_failed, is_own_code, place_in_script
from zerofit.scripts.capture.child.record import finish
from zerofit.scripts.on_import import around, when_imported

if TYPE_CHECKING:
    from zerofit.scripts.capture.child.observations import Observations

_NEUTRALIZED_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("tf32", "deepspeed", "parallelism_config")),
    "fsdp": [],
    "torch_compile": False,
    "activation_offloading": False,
}
"""Fields of TrainingArguments, TRL's among them, that need a GPU or start an engine, and their values in a
capture.

Precision is handled with Accelerator.
"""

_GENERATING = ("GRPO", "PPO", "RLOO", "OnlineDPO", "XPO", "NashMD", "GKD", "MiniLLM", "GOLD", "GFPO", "PAPO")
"""Prefixes of TRL's trainers that train on generated output.

Source: https://huggingface.co/docs/trl, Trainers.
"""


def install(seen: Observations) -> None:
    """Set the hooks."""
    when_imported("transformers.training_args", _neutralize_arguments)
    when_imported("transformers.trainer", lambda module: _watch_trainers(module.Trainer, seen))
    when_imported(
        "transformers.trainer_callback", lambda module: _stop_at_first_forward(module.CallbackHandler, seen)
    )


def _neutralize_arguments(module: Any) -> None:
    """Make TrainingArguments for a GPU constructible without one; their original values are stored beside."""

    @around(module.TrainingArguments, "__post_init__")
    def post_init(original: Any, self: Any) -> None:
        said = {}
        for name, instead in _NEUTRALIZED_FIELDS.items():
            value = getattr(self, name, instead)
            if value and value != instead:
                said[name] = value
                setattr(self, name, instead)
        self._zerofit_said = said
        original(self)

    def new(cls: Any, *_: Any, **given: Any) -> Any:
        made = object.__new__(cls)
        made._zerofit_given = given_by_user(cls, given)
        return made

    module.TrainingArguments.__new__ = new
    module.is_torch_bf16_gpu_available = lambda: True


def given_by_user(arguments_class: Any, given: dict[str, Any]) -> frozenset[str]:
    """Return the fields that a script sets.

    A parser sets all of them: given are those on its command line, and those whose value is not the default,
    as TRL's configuration files set them.
    """
    defaults = {field.name: field.default for field in fields(arguments_class) if field.init}
    if not defaults.keys() <= given.keys():
        return frozenset(given)
    flags = (word[2:].partition("=")[0].replace("-", "_") for word in sys.argv if word.startswith("--"))
    changed = (name for name, default in defaults.items() if given[name] != default)
    return frozenset((*changed, *(flag.removeprefix("no_") for flag in flags)))


def _watch_trainers(trainer_class: Any, seen: Observations) -> None:
    def new(cls: Any, *given: Any, **named: Any) -> Any:
        if _generates_to_train(cls):
            args = named.get("args") or next((each for each in given if hasattr(each, "output_dir")), None)
            exit_failed(
                seen,
                "unsupported",
                f"{cls.__name__} trains on what the model generates, which can't be captured without its "
                f"weights{_beside_training(args)}",
                where=place_in_script(sys._getframe(1)),
            )
        made = object.__new__(cls)
        seen.trainers.append(made)
        return made

    trainer_class.__new__ = new


def _beside_training(args: Any) -> str:
    """Return what else takes the GPU beside such a trainer's model, and how to leave it room in a plan.

    Source: trl 1.16, trainer/grpo_config.py: vLLM in the ranks' own processes has its share of each GPU,
    except where it sleeps while the model trains; grpo_trainer.py: a reference model where beta is not 0.
    """
    said = []
    share = getattr(args, "vllm_gpu_memory_utilization", None)
    is_here = getattr(args, "use_vllm", False) and getattr(args, "vllm_mode", "") == "colocate"
    if is_here and share and not getattr(args, "vllm_enable_sleep_mode", False):
        said.append(
            f"vLLM takes {share:.0%} of each GPU beside it (vllm_gpu_memory_utilization): plan the rest with "
            f"--reserve {share:.0%}"
        )
    if beta := getattr(args, "beta", None):
        said.append(f"without adapters, a reference model (beta={beta:g}) takes the weights once more")
    return "".join(f"; {each}" for each in said)


def _generates_to_train(trainer_class: Any) -> bool:
    return hasattr(trainer_class, "_generate_and_score_completions") or any(
        base.__module__.partition(".")[0] == "trl" and base.__name__.startswith(_GENERATING)
        for base in trainer_class.__mro__
    )


def _stop_at_first_forward(handler_class: Any, seen: Observations) -> None:
    """When training begins, remove all callbacks but the script's own, and wait for the first forward pass.

    If that fails without weights, the capture ends with the first batch of the DataLoader.
    """

    @around(handler_class, "on_train_begin")
    def on_train_begin(original: Any, self: Any, args: Any, state: Any, control: Any) -> Any:
        trainer = next(
            (made for made in seen.trainers if made.__dict__.get("callback_handler") is self), None
        )
        if trainer is None or not seen.is_here:
            return original(self, args, state, control)
        self.callbacks = [callback for callback in self.callbacks if _is_own(callback)]
        args.eval_on_start = False

        def end_here(error: BaseException | None) -> None:
            why = f": {type(error).__name__}: {' '.join(str(error).split())[:200]}" if error else ""
            seen.note(
                "the Trainer's first forward pass was not reached; its batch is taken from the DataLoader"
                + why
            )
            finish(seen, trainer.accelerator, trainer.model_wrapped, None)

        seen.on_failure = end_here
        return original(self, args, state, control)


def _is_own(callback: Any) -> bool:
    import inspect

    try:
        return is_own_code(inspect.getfile(type(callback)))
    except (OSError, TypeError):
        return False
