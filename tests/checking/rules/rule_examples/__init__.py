"""A bad and a good example of each rule, by its id; files are named as those of zerofit/checking/rules/."""

from __future__ import annotations

import importlib
from itertools import chain
from pkgutil import walk_packages

from rule_examples.example import Examples


def _declared() -> dict[str, Examples]:
    modules = [importlib.import_module(module.name) for module in walk_packages(__path__, f"{__name__}.")]
    pairs = list(chain.from_iterable(getattr(module, "EXAMPLES", {}).items() for module in modules))
    assert len(pairs) == len(dict(pairs)), "two files have examples of the same rule"
    return dict(pairs)


EXAMPLES = _declared()
"""The examples of every rule."""
