"""Wraps methods of other libraries' classes, in the order of a table of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings

Wrapper = Callable[..., Any]
"""Called in place of a method, with what follows (the next step, in the end the library's own method) and the
method's arguments, the object first."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a method under a plan."""

    name: str
    wrappers: Callable[[Any, AppliedSettings, Changes], Mapping[str, Wrapper]]
    """Called with the class, the settings and the list of changes; returns the subject's wrappers by method,
    and none if the plan does not need them."""
    why_here: str
    """The reason for its place among the method's steps."""


Steps = Mapping[str, Sequence[Step]]
"""By the name of a method, its steps in the order in which they are called."""


def install_steps(table: Steps, owner: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Make the methods of a class, or functions of a module, take their steps."""
    subjects = dict.fromkeys(step.wrappers for steps in table.values() for step in steps)
    made = {subject: subject(owner, settings, changes) for subject in subjects}
    for subject, wrappers in made.items():
        for method in wrappers:
            assert any(step.wrappers is subject for step in table.get(method, ())), (subject, method)
    for method, steps in table.items():
        wrap(owner, method, *(made[step.wrappers][method] for step in steps if method in made[step.wrappers]))


def wrap(owner: Any, name: str, *wrappers: Wrapper) -> None:
    """Replace a class's method, or a module's function.

    Args:
        owner: a class or module.
        name: of the method or function.
        wrappers: the first is called first.
    """
    for wrapper in reversed(wrappers):
        setattr(owner, name, _wrapped(getattr(owner, name), wrapper))


def _wrapped(original: Any, wrapper: Wrapper) -> Any:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return wrapped


def around_steps(
    mark: str,
    around: Callable[..., Any],
    *,
    only: Callable[[Any, Any], bool] = lambda accelerator, optimizer: True,
) -> Wrapper:
    """Return a wrapper of prepare_optimizer() that replaces step() of each prepared optimizer, once.

    Args:
        mark: a field of the prepared optimizer that marks it as done.
        around: called with the Accelerator, the prepared optimizer, its original step(), and the arguments.
        only: called with the Accelerator and the prepared optimizer; returns whether to replace its step().
    """

    def prepare_optimizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, *args, **kwargs)
        if mark not in vars(prepared) and only(self, prepared):
            setattr(prepared, mark, True)
            before = prepared.step

            @functools.wraps(getattr(before, "__func__", before))
            def step(prepared: Any, *args: Any, **kwargs: Any) -> Any:
                return around(self, prepared, before, *args, **kwargs)

            # A bound method: a scheduler created from the optimizer later reads the function behind its
            # step().
            prepared.step = MethodType(step, prepared)
        return prepared

    return prepare_optimizer
