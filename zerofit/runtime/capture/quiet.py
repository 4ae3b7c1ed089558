"""Keeps a captured script from doing anything to the outside: trackers, the hub, files of weights."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from zerofit.runtime.on_import import when_imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.runtime.capture.seen import Seen

_HUB = (
    *("create_branch", "create_commit", "create_tag", "delete_file", "delete_folder", "delete_repo"),
    *("upload_file", "upload_folder", "upload_large_folder", "update_repo_settings", "create_pull_request"),
)
_LOADING = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler")
"""Methods of Trainer that read a checkpoint to go on from."""
_TRACKERS = {
    "wandb": (
        *("init", "login", "log", "watch", "finish", "save", "config", "run", "summary", "define_metric"),
        *("alert", "agent", "sweep", "Artifact", "log_artifact", "Table"),
    ),
    "mlflow": ("start_run", "log_params", "log_metrics", "log_artifact", "set_experiment", "end_run"),
    "trackio": ("init", "log", "finish"),
    "swanlab": ("init", "log", "login", "finish"),
    "comet_ml": ("init", "start", "login"),
}


def install(seen: Seen) -> None:
    """Set the hooks; trackers that a script calls by itself are quiet too."""

    def saves(*_: Any, **__: Any) -> None:
        seen.saves = True

    when_imported("huggingface_hub.hf_api", _quiet_hub)
    when_imported("torch.serialization", lambda module: _quiet_torch(module, saves))
    files = dict.fromkeys(("save_file", "save_model"), saves)

    def saves_configuration(model: Any, save_directory: Any, *_: Any, **__: Any) -> None:
        saves()
        _save_configuration(model, save_directory)

    pushes = {"push_to_hub": _nothing}
    when_imported("safetensors.torch", lambda module: _replace(module, files))
    when_imported("accelerate.accelerator", lambda module: _quiet_accelerator(module, saves))
    when_imported(
        "transformers.modeling_utils",
        lambda module: _replace(module.PreTrainedModel, {**pushes, "save_pretrained": saves_configuration}),
    )
    when_imported(
        "peft.peft_model", lambda module: _replace(module.PeftModel, {**pushes, "save_pretrained": saves})
    )
    when_imported("transformers.trainer", lambda module: _quiet_trainer(module, saves))
    for name, calls in _TRACKERS.items():
        when_imported(name, functools.partial(_quiet_tracker, calls=calls))


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for a call whose effect is not wanted."""


def _save_configuration(model: Any, save_directory: Any) -> None:
    """Write what a model is rebuilt from, without weights: a script may read it back before it trains."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.save_pretrained(save_directory)


def _quiet_hub(module: Any) -> None:
    def repository(_: Any, repo_id: str = "", *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(repo_id=repo_id, url="", endpoint="")

    calls = {name: _nothing for name in _HUB if hasattr(module.HfApi, name)}
    _replace(module.HfApi, {**calls, "create_repo": repository})
    api = module.api
    for name in (*calls, "create_repo"):  # functions of the module are methods bound to one object
        if hasattr(module, name):
            setattr(module, name, getattr(api, name))


def _quiet_torch(module: Any, saves: Callable[..., None]) -> None:
    """Let torch.save write all but weights: scripts keep prepared data by it, and read them back."""
    original = module.save

    @functools.wraps(original)
    def save(obj: Any, *args: Any, **kwargs: Any) -> None:
        if _holds_weights(obj):
            saves()
        else:
            original(obj, *args, **kwargs)

    module.save = save


def _holds_weights(obj: Any) -> bool:
    inner = list(obj.values()) if isinstance(obj, dict) else []
    return any(hasattr(one, "state_dict") or hasattr(one, "_metadata") for one in (obj, *inner))


def _quiet_accelerator(module: Any, saves: Callable[..., None]) -> None:
    calls = dict.fromkeys(("save", "save_state", "save_model"), saves)
    _replace(module.Accelerator, {**calls, "init_trackers": _nothing, "load_state": _nothing})


def _quiet_trainer(module: Any, saves: Callable[..., None]) -> None:
    quiet = dict.fromkeys(("init_hf_repo", "push_to_hub", "create_model_card"), _nothing)
    loads = dict.fromkeys(_LOADING, _nothing)
    _replace(module.Trainer, {**quiet, **loads, "save_model": saves, "save_state": saves})


def _quiet_tracker(module: Any, *, calls: tuple[str, ...]) -> None:
    from unittest.mock import MagicMock

    _replace(module, {name: MagicMock() for name in calls if hasattr(module, name)})


def _replace(holder: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(holder, name):
            setattr(holder, name, value)
