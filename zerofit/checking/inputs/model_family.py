"""The family of the model that a run trains, as transformers names it: "llama", "qwen2"."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zerofit.core.upstream.model_code import families_with_class, family_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation

_ARGUMENTS = ("model_name_or_path", "model_name", "model_id", "model", "base_model")
"""Arguments and recipe keys with a model's name, in public scripts. ASSUMPTION."""
_LOADED = re.compile(r"""from_pretrained\(\s*["']([^"']+)["']""")
_MADE = re.compile(r"(?:\w+\.)*([A-Z]\w+)\((?!.*\bfrom_pretrained)")


def model_families(situation: Situation) -> tuple[str, ...]:
    """Return the families of all models that the script makes or its arguments name; () if one is unknown."""
    found = [*_of_arguments(situation), *_of_script(situation)]
    return tuple(dict.fromkeys(filter(None, found))) if found and None not in found else ()


def _of_arguments(situation: Situation) -> Iterator[str | None]:
    for name in _ARGUMENTS:
        said = situation.arguments.find(name)
        if said is not None and isinstance(said.value, str):
            yield family_of(said.value)
            return


def _of_script(situation: Situation) -> Iterator[str | None]:
    for model in situation.script.models if situation.script else ():
        if not model.is_trained:
            continue
        loaded, made = _LOADED.search(model.made.text), _MADE.match(model.made.text)
        if loaded is not None:
            yield family_of(loaded[1])
        elif made is not None and (families := families_with_class(made[1])):
            yield families[0] if len(families) == 1 else None
        else:
            yield None
