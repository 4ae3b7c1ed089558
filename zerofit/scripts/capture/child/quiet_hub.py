"""Makes the hub read-only for a captured script."""

from __future__ import annotations

import functools
import inspect
import re
from types import SimpleNamespace
from typing import Any

from zerofit.scripts.on_import import when_imported

_READS = re.compile(
    r"^(get|list|fetch|inspect|parse|read|resolve|search|verify)_"
    r"|_(info|exists|download)$"
    r"|^(whoami|auth_check|download_bucket_files|run_as_future)$"
)
"""Read-only methods of HfApi, by name; run_as_future calls others.

Source: https://huggingface.co/docs/huggingface_hub/package_reference/hf_api
"""
_PUSHES = {
    "transformers.utils.hub": "PushToHubMixin",
    "transformers.modeling_utils": "PreTrainedModel",
    "peft.peft_model": "PeftModel",
    "datasets.arrow_dataset": "Dataset",
    "datasets.dataset_dict": "DatasetDict",
}
"""Classes with their own push_to_hub(), which would read files that were never written."""


def install() -> None:
    """Set the hooks."""
    when_imported("huggingface_hub.hf_api", _quiet)
    for name, holder in _PUSHES.items():
        when_imported(name, functools.partial(_no_push, holder=holder))


def is_reading(name: str) -> bool:
    """Return True if a method of HfApi is read-only."""
    return bool(_READS.search(name))


def _quiet(module: Any) -> None:
    methods = [name for name, _ in inspect.getmembers(module.HfApi, callable) if not name.startswith("_")]
    for name in methods:
        if not is_reading(name):
            setattr(module.HfApi, name, _repository if name == "create_repo" else _nothing)
            if hasattr(module, name):  # the module's functions are methods of one object
                setattr(module, name, getattr(module.api, name))


def _repository(_: Any, repo_id: str = "", *args: Any, **kwargs: Any) -> Any:
    return SimpleNamespace(repo_id=repo_id, url="", endpoint="")


def _nothing(*_: Any, **__: Any) -> Any:
    """Replace a call that changes something, and everything it returns."""
    from unittest.mock import MagicMock

    return MagicMock()


def _no_push(module: Any, *, holder: str) -> None:
    getattr(module, holder).push_to_hub = lambda *_, **__: None
