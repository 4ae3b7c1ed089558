"""Keeps a captured script from writing weights, and from reading a checkpoint to go on from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.transformers import TRAINER_RESUMES
from zerofit.scripts.on_import import around, when_imported

if TYPE_CHECKING:
    from collections.abc import Callable


def install(note: Callable[[], None]) -> None:
    """Set the hooks.

    Args:
        note: called each time that the script would save.
    """

    def saves(*_: Any, **__: Any) -> None:
        note()

    when_imported("torch.serialization", lambda module: _quiet_torch(module, saves))
    files = dict.fromkeys(("save_file", "save_model"), saves)

    def saves_configuration(model: Any, save_directory: Any, *_: Any, **__: Any) -> None:
        saves()
        _save_configuration(model, save_directory)

    when_imported("safetensors.torch", lambda module: _replace(module, files))
    when_imported("accelerate.accelerator", lambda module: _quiet_accelerator(module, saves))
    when_imported(
        "transformers.modeling_utils",
        lambda module: _replace(module.PreTrainedModel, {"save_pretrained": saves_configuration}),
    )
    when_imported("peft.peft_model", lambda module: _replace(module.PeftModel, {"save_pretrained": saves}))
    when_imported("transformers.trainer", lambda module: _quiet_trainer(module, saves))


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for a call whose effect is not wanted."""


def _save_configuration(model: Any, save_directory: Any) -> None:
    """Write what a model is rebuilt from, without weights: a script may read it back before it trains."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(save_directory)


def _quiet_torch(module: Any, saves: Callable[..., None]) -> None:
    """Let torch.save write all but weights: scripts keep prepared data by it, and read them back."""

    @around(module, "save")
    def save(original: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        if _holds_weights(obj):
            saves()
        else:
            original(obj, *args, **kwargs)


def _holds_weights(obj: Any) -> bool:
    inner = list(obj.values()) if isinstance(obj, dict) else []
    return any(hasattr(one, "state_dict") or hasattr(one, "_metadata") for one in (obj, *inner))


def _quiet_accelerator(module: Any, saves: Callable[..., None]) -> None:
    calls = dict.fromkeys(("save", "save_state", "save_model"), saves)
    _replace(module.Accelerator, {**calls, "load_state": _nothing})


def _quiet_trainer(module: Any, saves: Callable[..., None]) -> None:
    quiet = dict.fromkeys(("init_hf_repo", "push_to_hub", "create_model_card"), _nothing)
    loads = dict.fromkeys(TRAINER_RESUMES, _nothing)
    _replace(module.Trainer, {**quiet, **loads, "save_model": saves, "save_state": saves})


def _replace(holder: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(holder, name):
            setattr(holder, name, value)
