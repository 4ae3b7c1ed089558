"""Keeps what a script does with weights and gradients under ZeRO, or refuses it before a step differs."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream import zero_fragments
from zerofit.core.upstream.deepspeed import READ_WEIGHTS, around_each_step, base_optimizer
from zerofit.core.upstream.torch import taken_step_hooks
from zerofit.training.step.deepspeed.script_gradients import (
    Access,
    ScriptGradients,
    forget_accesses,
    watch_accesses,
)
from zerofit.training.step.deepspeed.script_weights import ScriptWeights
from zerofit.training.step.deepspeed.sharded_reads import ShardedReads
from zerofit.training.step.deepspeed.untrained_parameters import UntrainedParameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zerofit.training.changes import Changes

OwnOptimizers = Sequence[tuple[Any, Sequence[Sequence[Any]]]]
"""A script's optimizers, each with the parameters of its groups."""

_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


class Guard:
    """Watches one DeepSpeed engine under ZeRO.

    Args:
        engine: a DeepSpeedEngine with an optimizer.
        own: the script's optimizers, and the parameters of their groups before DeepSpeed was set up.
        changes: receives changes.
    """

    def __init__(self, engine: Any, own: OwnOptimizers, changes: Changes) -> None:
        groups = [group for _, groups in own for group in groups]
        named = list(engine.module.named_parameters())
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        held = {id(parameter) for group in groups for parameter in group}
        self._engine = weakref.proxy(engine)
        base = base_optimizer(engine)
        self._groups = _ScriptGroups(base, groups)
        # With offload DeepSpeed's Adam replaces the script's, and has none of its hooks.
        hooked = (base, *(optimizer for optimizer, _ in own))
        self._hooked = list({id(optimizer): optimizer for optimizer in hooked}.values())
        self._frozen = [
            (name, parameter)
            for name, parameter in named
            if not parameter.requires_grad and id(parameter) in held
        ]
        self._num_steps = 0
        self._weights = ScriptWeights(self._engine, trained, changes)
        self._untrained = UntrainedParameters(self._engine, trained, changes)
        self._gradients = ScriptGradients(
            {id(parameter): name for name, parameter in trained}, engine.zero_optimization_stage()
        )
        self.is_stepping = False
        """True while the engine steps."""
        self.modules = frozenset(map(id, engine.module.modules()))
        """Ids of the model's modules when it was prepared."""
        parameters = [parameter for _, parameter in trained]
        watch_accesses(parameters, Access(self._weights, self._gradients))
        weakref.finalize(engine, forget_accesses, [id(parameter) for parameter in parameters])
        self._reads = ShardedReads({id(parameter): name for name, parameter in named} if self.shards else {})
        self._hook(engine, base)
        _guards.add(self)
        self._reads.begin(has_trained=False)

    @property
    def shards(self) -> bool:
        """True under ZeRO-3."""
        return bool(self._engine.zero_optimization_partition_weights())

    def _hook(self, engine: Any, base: Any) -> None:
        engine.register_forward_pre_hook(lambda module, _: self._before_pass(module))
        engine.register_forward_hook(lambda module, *_: self._after_pass(module))
        base.register_step_pre_hook(lambda *_: self._untrained.save())
        base.register_step_post_hook(lambda *_: self._untrained.restore())
        zero_grad = engine.zero_grad

        @functools.wraps(zero_grad)
        def zero(*args: Any, **kwargs: Any) -> None:
            if not self.is_stepping:
                self.zero_grad()
            zero_grad(*args, **kwargs)

        engine.zero_grad = zero
        around_each_step(engine, self.step)
        for name in READ_WEIGHTS:
            setattr(engine, name, _inside(getattr(engine, name), self.saving))
        engine.load_checkpoint = _inside(engine.load_checkpoint, self.loading)
        optimizer = engine.optimizer
        for name in ("state_dict", "load_state_dict"):
            setattr(optimizer, name, _inside(getattr(optimizer, name), self._groups.flat))
        for own in self._hooked:
            _lend_methods(own, optimizer)
        optimizer.add_param_group = base.add_param_group = _refuse_group
        engine._zerofit_guard = self

    def _after_pass(self, engine: Any) -> None:
        import torch

        if engine.training and torch.is_grad_enabled():
            self._reads.begin(has_trained=self._num_steps > 0)

    def _before_pass(self, engine: Any) -> None:
        import torch

        self._reads.end()
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
        if set_to_none:
            self._untrained.discard()
        else:
            self._untrained.keep_zeros()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Save, in this context, what the script wrote."""
        # Under ZeRO-3 all ranks gather; before, a script may save on one rank only.
        check = functools.partial(self._untrained.check_written, self._num_steps)
        agree = check if self.shards else lambda _: None
        with self._weights.saving(self._num_steps, agree), self._groups.flat():
            yield

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Load a checkpoint in this context."""
        with self._groups.flat():
            yield
        self._weights.forget_loaded()

    def carry_gathered(self, parameters: Iterable[Any]) -> None:
        """Carry what was written inside GatheredParameters."""
        self._weights.carry_gathered(parameters, self._num_steps)

    def step(self, take: Callable[[], None]) -> None:
        """Take an engine's step.

        The script's hooks run around it: inside they would run before the weights are written, and once for
        each group.
        """
        self.is_stepping = True
        self._reads.end()
        skipped = self._engine.skipped_steps
        try:
            with taken_step_hooks(self._hooked, stay=_is_zerofits) as (before, after):
                self._run(before)
                self._weights.check(self._num_steps)
                self._untrained.begin_step(self._num_steps, self._weights.take_written())
                with self._groups.flat():
                    take()
                self._untrained.end_step()
                if self._untrained.has_changed:
                    self._weights.compare_next()
                self._num_steps += 1
                if self._engine.skipped_steps == skipped:
                    self._run(after)
        finally:
            self.is_stepping = False
        self._reads.begin(has_trained=True)

    def _run(self, hooks: list[Callable[[], None]]) -> None:
        """Run the script's hooks."""
        self._reads.begin(has_trained=True)
        for hook in hooks:
            hook()
        self._reads.end()


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
        groups = self._base.param_groups
        if self._depth == 1:
            for group, parameters in zip(groups, self._flat, strict=False):
                group["params"] = parameters
        try:
            yield
        except BaseException:
            # DeepSpeed gives the optimizer one group at a time, and leaves it with that one when it fails.
            self._base.param_groups = groups
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._put_own()

    def _put_own(self) -> None:
        if self._own:
            self._flat = [group["params"] for group in self._base.param_groups]
            for group, parameters in zip(self._base.param_groups, self._own, strict=True):
                group["params"] = list(parameters)


def _lend_methods(own: Any, wrapper: Any) -> None:
    """Give an optimizer of DeepSpeed the methods of the script's that it lacks: first_step() of SAM."""
    from torch.optim import Optimizer

    for name in dir(type(own)):
        if not (name.startswith("_") or hasattr(Optimizer, name) or hasattr(wrapper, name)):
            setattr(wrapper, name, getattr(own, name))


def _is_zerofits(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("zerofit")


def _inside(
    original: Callable[..., Any], context: Callable[[], contextlib.AbstractContextManager[None]]
) -> Callable[..., Any]:
    """Return a function that runs in a context."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    return call


def _refuse_group(*_: Any, **__: Any) -> None:
    raise UserError(
        "group-added-under-zero",
        "the script adds parameters to its optimizer after ZeRO has sharded them",
        found="optimizer.add_param_group() after accelerator.prepare()",
        why="ZeRO's buffers hold what the optimizer had when it was prepared; later parameters would not "
        "train",
        fix="add them before accelerator.prepare(), or train without ZeRO: --engine native",
    )


def watch(engine: Any, own: OwnOptimizers, changes: Changes) -> None:
    """Watch an engine under ZeRO, once."""
    if engine.zero_optimization() and not hasattr(engine, "_zerofit_guard"):
        _follow_gathering()
        Guard(engine, own, changes)


def guard_of(engine: Any) -> Guard | None:
    """Return an engine's guard; None without ZeRO."""
    guard: Guard | None = getattr(engine, "_zerofit_guard", None)
    return guard


@functools.cache
def _follow_gathering() -> None:
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def carry(parameters: list[Any]) -> None:
        for guard in tuple(_guards):
            guard.carry_gathered(parameters)

    zero_fragments.after_gathering(carry)
    register_module_parameter_registration_hook(_refuse_registration)


def _refuse_registration(module: Any, name: str, parameter: Any) -> None:
    """Refuse a parameter that the script puts into a module that ZeRO-3 trains."""
    if parameter is None or not parameter.requires_grad:
        return
    for guard in tuple(_guards):
        if guard.shards and id(module) in guard.modules:
            raise UserError(
                "parameter-replaced-under-zero3",
                "the script puts a parameter into a model that ZeRO-3 has sharded",
                found=f"{type(module).__name__}.{name} is set after accelerator.prepare()",
                why="ZeRO-3 gathers the parameters that it found when the model was prepared",
                fix="build and tie the model before accelerator.prepare(), or use --zero-stage 2",
            )


def _unfrozen(name: str, step: int) -> UserError:
    return UserError(
        "unfrozen-under-zero",
        "the script unfreezes a parameter that ZeRO does not step",
        found=f"{name}.requires_grad became True after step {step}",
        why="ZeRO shards what trains when the model is prepared; what is unfrozen later would never be "
        "stepped",
        fix="train without ZeRO: --engine native; or unfreeze before accelerator.prepare()",
    )
