"""Keeps what a script does with weights and gradients under ZeRO, or refuses it before a step would differ."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream import zero_fragments
from zerofit.core.upstream.deepspeed import base_optimizer
from zerofit.training.deepspeed.script_gradients import (
    Access,
    ScriptGradients,
    forget_accesses,
    watch_accesses,
)
from zerofit.training.deepspeed.script_weights import ScriptWeights
from zerofit.training.deepspeed.untrained_parameters import UntrainedParameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zerofit.training.changes import Changes

_SAVING = ("save_checkpoint", "save_16bit_model", "_zero3_consolidated_16bit_state_dict")
"""Methods of an engine that read its weights or their master copy."""

_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


class Guard:
    """Watches one DeepSpeed engine under ZeRO.

    Args:
        engine: a DeepSpeedEngine with an optimizer.
        groups: the parameters of each of the script's optimizer's groups, frozen ones included.
        changes: receives changes.
    """

    def __init__(self, engine: Any, groups: Sequence[Sequence[Any]], changes: Changes) -> None:
        named = list(engine.module.named_parameters())
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        held = {id(parameter) for group in groups for parameter in group}
        self._engine = weakref.proxy(engine)
        self._groups = _ScriptGroups(base_optimizer(engine), groups)
        self._frozen = [(name, one) for name, one in named if not one.requires_grad and id(one) in held]
        self._num_steps = 0
        self._weights = ScriptWeights(self._engine, trained, changes)
        self._untrained = UntrainedParameters(self._engine, trained, changes)
        self._gradients = ScriptGradients(
            {id(parameter): name for name, parameter in trained}, engine.zero_optimization_stage()
        )
        self._own_hooks: set[int] = set()
        self._is_stepping = False
        parameters = [parameter for _, parameter in trained]
        watch_accesses(parameters, Access(self._weights, self._gradients))
        weakref.finalize(engine, forget_accesses, [id(parameter) for parameter in parameters])
        self._hook(engine)
        _guards.add(self)

    def _hook(self, engine: Any) -> None:
        engine.register_forward_pre_hook(lambda module, _: self._before_pass(module))
        base = base_optimizer(engine)
        self._own_hooks = {
            base.register_step_pre_hook(lambda *_: self._untrained.save()).id,
            base.register_step_post_hook(lambda *_: self._untrained.restore()).id,
        }
        take_model_step, zero_grad = engine._take_model_step, engine.zero_grad
        held = weakref.ref(self)

        @functools.wraps(take_model_step)
        def step(*args: Any, **kwargs: Any) -> None:
            held().step(base, take_model_step, *args, **kwargs)

        @functools.wraps(zero_grad)
        def zero(*args: Any, **kwargs: Any) -> None:
            if not held()._is_stepping:
                held().zero_grad()
            zero_grad(*args, **kwargs)

        engine._take_model_step, engine.zero_grad = step, zero
        for name in _SAVING:
            setattr(engine, name, _inside(getattr(engine, name), held, Guard.saving))
        engine.load_checkpoint = _inside(engine.load_checkpoint, held, Guard.loading)
        optimizer = engine.optimizer
        for name in ("state_dict", "load_state_dict"):
            setattr(optimizer, name, _inside(getattr(optimizer, name), held, Guard.loading))
        optimizer.add_param_group = base.add_param_group = _refuse_group
        engine._zerofit_guard = self

    def _before_pass(self, engine: Any) -> None:
        import torch

        if engine.training and torch.is_grad_enabled():
            for name, parameter in self._frozen:
                if parameter.requires_grad:
                    raise _unfrozen(name, self._num_steps)
            self._weights.check(self._num_steps)

    def begin_backward(self) -> None:
        """Handle a backward pass of the script: without ZeRO there would be gradients now."""
        self._gradients.are_there = True

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Handle the script's zero_grad()."""
        self._gradients.are_there = False
        if not set_to_none:
            self._untrained.keep_zeros()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Save, in this context, what the script wrote."""
        with self._weights.saving(self._num_steps), self._groups.flat():
            yield

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for DeepSpeed's loading."""
        return self._groups.flat()

    def carry_gathered(self, parameters: Iterable[Any]) -> None:
        """Carry what was written inside GatheredParameters."""
        self._weights.carry_gathered(parameters)

    def step(self, base: Any, take_model_step: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Take an engine's step."""
        self._is_stepping = True
        skipped = self._engine.skipped_steps
        try:
            with self._without_script_hooks(base) as (before, after):
                for hook in before:
                    hook(base, (), {})
                self._weights.check(self._num_steps)
                self._untrained.begin_step()
                with self._groups.flat():
                    take_model_step(*args, **kwargs)
                self._untrained.end_step()
                self._num_steps += 1
                if self._engine.skipped_steps == skipped:
                    for hook in after:
                        hook(base, (), {})
        finally:
            self._is_stepping = False

    @contextlib.contextmanager
    def _without_script_hooks(self, base: Any) -> Iterator[list[list[Any]]]:
        """Take the script's hooks from the optimizer, and return those before and after a step.

        Inside ZeRO's step they would run before the weights are written, and once for each group.
        """
        kept = [dict(hooks) for hooks in (base._optimizer_step_pre_hooks, base._optimizer_step_post_hooks)]
        of_script = [[hook for key, hook in hooks.items() if key not in self._own_hooks] for hooks in kept]
        for hooks in (base._optimizer_step_pre_hooks, base._optimizer_step_post_hooks):
            for key in [key for key in hooks if key not in self._own_hooks]:
                del hooks[key]
        try:
            yield of_script
        finally:
            base._optimizer_step_pre_hooks.update(kept[0])
            base._optimizer_step_post_hooks.update(kept[1])


class _ScriptGroups:
    """The parameters in the groups of an optimizer: the script's between steps, ZeRO's flat ones in them.

    A script that goes through its optimizer's groups would write to flat buffers, and find no gradients.
    """

    def __init__(self, base: Any, groups: Sequence[Sequence[Any]]) -> None:
        self._base = base
        self._own = groups if len(groups) == len(base.param_groups) else ()
        self._flat: list[Any] = []
        self._depth = 0
        self._put_own()

    @contextlib.contextmanager
    def flat(self) -> Iterator[None]:
        """Put ZeRO's parameters into the groups in this context."""
        self._depth += 1
        if self._depth == 1:
            for group, parameters in zip(self._base.param_groups, self._flat, strict=False):
                group["params"] = parameters
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._put_own()

    def _put_own(self) -> None:
        if self._own:
            self._flat = [group["params"] for group in self._base.param_groups]
            for group, parameters in zip(self._base.param_groups, self._own, strict=True):
                group["params"] = list(parameters)


def _inside(
    original: Callable[..., Any],
    held: weakref.ref[Guard],
    context: Callable[[Guard], contextlib.AbstractContextManager[None]],
) -> Callable[..., Any]:
    """Return a function that runs in a context of the guard, while there is one."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        guard = held()
        with contextlib.nullcontext() if guard is None else context(guard):
            return original(*args, **kwargs)

    return call


def _refuse_group(*_: Any) -> None:
    raise UserError(
        "group-added-under-zero",
        "the script adds parameters to its optimizer after ZeRO has sharded them",
        found="optimizer.add_param_group() after accelerator.prepare()",
        why="ZeRO's buffers hold what the optimizer had when it was prepared; later parameters would not train",
        fix="add them before accelerator.prepare(), or train without ZeRO: --engine native",
    )


def watch(engine: Any, groups: Sequence[Sequence[Any]], changes: Changes) -> None:
    """Watch an engine under ZeRO, once."""
    if engine.zero_optimization() and not hasattr(engine, "_zerofit_guard"):
        _follow_gathering()
        Guard(engine, groups, changes)


def guard_of(engine: Any) -> Guard | None:
    """Return an engine's guard; None without ZeRO."""
    guard: Guard | None = getattr(engine, "_zerofit_guard", None)
    return guard


@functools.cache
def _follow_gathering() -> None:
    def carry(parameters: list[Any]) -> None:
        for guard in tuple(_guards):
            guard.carry_gathered(parameters)

    zero_fragments.after_gathering(carry)


def _unfrozen(name: str, step: int) -> UserError:
    return UserError(
        "unfrozen-under-zero",
        "the script unfreezes a parameter that ZeRO does not step",
        found=f"{name}.requires_grad became True after step {step}",
        why="ZeRO shards what trains when the model is prepared; what is unfrozen later would never be stepped",
        fix="train without ZeRO: --engine native; or unfreeze before accelerator.prepare()",
    )
