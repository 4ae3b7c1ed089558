"""What one message says beyond its kind: the network's fault, or the argument that a library refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.upstream.transformers import TRAINER_RENAMED
from zerofit.launching.network_faults import NETWORK_FAILED, named_fault

if TYPE_CHECKING:
    from zerofit.launching.failures import KnownFailure

_ARGUMENT_REFUSED = "training-argument-unknown"
_REFUSED = re.compile(r"(?P<owner>[\w.]{1,100})\(\) got an unexpected keyword argument '(?P<name>\w{1,60})'")
_MEANT = re.compile(r"Did you mean '(\w{1,60})'")
_OF_LOSS = ("labels", "num_items_in_batch")
"""Arguments of a model that computes a loss."""


def refined(failure: KnownFailure, text: str) -> KnownFailure:
    """Return a failure with what its message names beyond its kind, if anything."""
    if failure.id == NETWORK_FAILED:
        return named_fault(failure, text)
    return _with_argument(failure, text) if failure.id == _ARGUMENT_REFUSED else failure


def _with_argument(failure: KnownFailure, text: str) -> KnownFailure:
    """Return the failure with what to write in place of an argument, if that is known."""
    match = _REFUSED.search(text)
    if match is None:
        return failure
    owner, name = match["owner"].removesuffix(".__init__").removesuffix(".forward"), match["name"]
    if match["owner"].endswith("Model.forward") and name in _OF_LOSS:
        why = f"{owner} has no head that computes a loss, so that its forward takes no {name}"
        fix = "load the model with its head: AutoModelForCausalLM, or another AutoModelFor..., for AutoModel"
        return replace(failure, why=why, fix=fix)
    instead = _instead(owner, name)
    if (meant := _MEANT.search(text)) is not None:
        instead = f"write {meant[1]}"
    if instead is None:
        return failure
    return replace(failure, fix=f"{instead} in place of {name} in {owner}(); {failure.fix}")


def _instead(owner: str, name: str) -> str | None:
    """Return what transformers has in place of an argument: "write eval_strategy"."""
    if owner.endswith("Trainer"):
        return f"write {TRAINER_RENAMED[name]}" if name in TRAINER_RENAMED else None
    if not owner.endswith(("Arguments", "Config")):
        return None
    from zerofit.configs.schemas.catalog import load_schemas  # only if it is needed

    removed = load_schemas().training_arguments.removed
    return next((former.fix for former in removed if former.path[0] == name), None)
