"""Prevents a captured script from writing weights, and from loading a checkpoint to resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.transformers import TRAINER_RESUMES
from zerofit.scripts.on_import import around, when_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def install(note: Callable[[], None], *, may_save: Callable[[], bool] = lambda: False) -> None:
    """Install the hooks.

    Args:
        note: called each time that the script would save.
        may_save: returns True while saving is allowed.
    """

    def saves(*_: Any, **__: Any) -> None:
        note()

    def replace(holder: Any, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if hasattr(holder, name):
                around(holder, name)(
                    lambda original, *args, _value=value, **kwargs: (original if may_save() else _value)(
                        *args, **kwargs
                    )
                )

    def saves_configuration(model: Any, save_directory: Any, *_: Any, **__: Any) -> None:
        saves()
        _save_configuration(model, save_directory)

    when_imported("torch.serialization", lambda module: _quiet_torch(module, saves, may_save))
    files = dict.fromkeys(("save_file", "save_model"), saves)
    when_imported("safetensors.torch", lambda module: replace(module, files))
    accelerator = dict.fromkeys(("save", "save_state", "save_model"), saves)
    when_imported("accelerate.accelerator", lambda module: replace(module.Accelerator, accelerator))
    when_imported(
        "transformers.modeling_utils",
        lambda module: replace(module.PreTrainedModel, {"save_pretrained": saves_configuration}),
    )
    when_imported("peft.peft_model", lambda module: replace(module.PeftModel, {"save_pretrained": saves}))
    trainer = dict.fromkeys(("save_model", "save_state"), saves)
    when_imported("transformers.trainer", lambda module: replace(module.Trainer, trainer))
    unwanted = ("init_hf_repo", "push_to_hub", "create_model_card", *TRAINER_RESUMES)
    when_imported("transformers.trainer", lambda module: _drop(module.Trainer, unwanted))
    when_imported("accelerate.accelerator", lambda module: _drop(module.Accelerator, ("load_state",)))


def _nothing(*_: Any, **__: Any) -> None:
    """Replace a call whose effect is unwanted."""


def _save_configuration(model: Any, save_directory: Any) -> None:
    """Write a model's configuration without weights: a script may read it back before it trains."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(save_directory)


def _quiet_torch(module: Any, saves: Callable[..., None], may_save: Callable[[], bool]) -> None:
    """Let torch.save write everything but weights, since scripts read back prepared data."""

    @around(module, "save")
    def save(original: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        if _holds_weights(obj) and not may_save():
            saves()
        else:
            original(obj, *args, **kwargs)


def _holds_weights(obj: Any) -> bool:
    inner = list(obj.values()) if isinstance(obj, dict) else []
    return any(hasattr(part, "state_dict") or hasattr(part, "_metadata") for part in (obj, *inner))


def _drop(holder: Any, names: Sequence[str]) -> None:
    """Make calls do nothing."""
    for name in names:
        if hasattr(holder, name):
            setattr(holder, name, _nothing)
