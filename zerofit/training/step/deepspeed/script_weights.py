"""Keeps ZeRO's master copy equal to the weights: carries what the script writes, and finds what else differs.

ZeRO steps a copy of the weights and overwrites the model's from it. What a script writes into the model
between two steps (a clamp, Lookahead, weights loaded by hand) would be lost at the next step.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.zero_fragments import (
    fragment_of,
    holds_master_in_files,
    is_gathered,
    rounds_weights_otherwise,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from zerofit.core.upstream.zero_fragments import Fragment
    from zerofit.training.changes import Changes

_FIRST_STEPS, _EVERY = 10, 50
"""All weights are compared after each of the first steps, and then every so many. A comparison reads 6
bytes of each weight that this rank steps; a step of AdamW reads and writes 28."""
_CARRIED = (
    "weights that the script writes between steps are carried into the master copy, which DeepSpeed steps"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A weight that the script has written on this rank since the last step."""

    digest: int
    """Of the whole weight, below 255."""
    is_changed: bool
    """True if an element differs that this rank steps; False if what was written is what was there."""


class ScriptWeights:
    """The trained weights of one engine, and what the script has written to them since the last check.

    In-place operations raise a tensor's `_version`, whether they are called on the parameter, on a view of
    it or on what `parameter.data` returned. DeepSpeed's own writes go to its flat buffers and raise none.
    """

    def __init__(self, engine: Any, trained: Sequence[tuple[str, Any]], changes: Changes) -> None:
        self._engine = engine
        self._trained = trained
        self._changes = changes
        self._versions = {id(parameter): parameter._version for _, parameter in trained}
        self._aliases: dict[int, Any] = {}
        """What `parameter.data` returned, by the parameter's id."""
        self._gathered_alias = 0
        """The id of the only gathered ZeRO-3 weight among them: each keeps its memory."""
        self._written: set[int] = set()
        """Ids of parameters that were written through `.data`."""
        self._carried_at: dict[int, int] = {}
        """The step after which each parameter was first carried, by its id."""
        self._since_step: dict[int, Written] = {}
        """What was written since the last step, by the parameter's id, of weights that all ranks hold."""
        self._step_compared = -1
        self._compares_next = False
        self._is_comparable = not rounds_weights_otherwise(engine)

    def alias(self, parameter: Any, tensor: Any) -> Any:
        """Return the tensor that the script gets for `parameter.data`, so that writes to it are seen.

        Args:
            parameter: a trained one.
            tensor: what torch returns: an alias with its own version, which starts at 0.
        """
        key = id(parameter)
        held = self._aliases.get(key)
        if held is not None and held.data_ptr() == tensor.data_ptr() and held.shape == tensor.shape:
            return held
        self._release(key)
        if hasattr(parameter, "ds_tensor"):
            self._release(self._gathered_alias)
            self._gathered_alias = key
        self._aliases[key] = tensor
        return tensor

    def replace(self, parameter: Any, tensor: Any) -> None:
        """Handle the script's `parameter.data = tensor`: copy it, so that ZeRO's buffers stay the weights.

        Raises:
            UserError: the tensor has another shape, or ZeRO-3 holds no whole weight now.
        """
        if not is_gathered(parameter):
            raise _lost(self._name_of(parameter))
        if tensor.shape != parameter.shape:
            raise _other_shape(self._name_of(parameter), parameter, tensor)
        self._written.add(id(parameter))
        parameter.detach().copy_(tensor)

    def check(self, step: int) -> None:
        """Carry what the script has written, and from time to time compare all weights with the master copy.

        Args:
            step: optimizer steps so far.

        Raises:
            UserError: weights differ that the script has not written, or ZeRO-3 has lost what it wrote.
        """
        for name, parameter in self._trained_and_written():
            if not is_gathered(parameter):
                raise _lost(name)
            self._carry(parameter, step)
        is_due = self._compares_next or step <= _FIRST_STEPS or step % _EVERY == 0
        if step and is_due and step != self._step_compared:
            self._step_compared, self._compares_next = step, False
            self._compare(step, self._trained)

    def forget_loaded(self) -> None:
        """Handle the end of DeepSpeed's own loading: it copies nothing into what stands for a sharded weight.

        It loads shards and master copy by themselves, but the version rises all the same.
        """
        for _, parameter in self._trained_and_written():
            if not is_gathered(parameter):
                self._written.discard(id(parameter))
                self._versions[id(parameter)] = parameter._version

    def compare_next(self) -> None:
        """Compare all weights before the next pass, whatever the step."""
        self._compares_next = True

    @contextlib.contextmanager
    def saving(self, step: int, agree: Callable[[Mapping[int, Written]], None]) -> Iterator[None]:
        """Save, in this context, what the script has written, as from one process.

        Args:
            step: optimizer steps so far.
            agree: called with what is written, by the parameter's id, before it is saved.

        The master copy is restored, as a script may swap in an average to save it: weights of 16 bits would
        come back without their low bits. All other weights are compared first.
        """
        written = dict(self._trained_and_written())
        if step:
            self._compare(step, [named for named in self._trained if named[0] not in written])
        changed, marks = [], {}
        for name, parameter in written.items():
            if not is_gathered(parameter):
                raise _lost(name)
            fragment = fragment_of(self._engine, parameter)
            is_changed = False
            if fragment is not None:
                changed.append((fragment.master, fragment.master.clone()))
                is_changed = _copy_to_master(fragment)
            if _is_everywhere(parameter):
                marks[id(parameter)] = Written(digest=_digest(parameter), is_changed=is_changed)
        try:
            agree(marks)
            yield
        finally:
            for master, before in changed:
                master.copy_(before)

    def _trained_and_written(self) -> list[tuple[str, Any]]:
        for key in tuple(self._aliases):
            self._release(key)
        return [
            (name, parameter)
            for name, parameter in self._trained
            if parameter._version != self._versions[id(parameter)] or id(parameter) in self._written
        ]

    def carry_gathered(self, parameters: Iterable[Any], step: int) -> None:
        """Carry what one rank has written inside GatheredParameters, after ZeRO-3 has sharded it again."""
        for parameter in parameters:
            if id(parameter) in self._versions:
                self._aliases.pop(id(parameter), None)
                self._carry(parameter, step)

    def _carry(self, parameter: Any, step: int) -> None:
        key = id(parameter)
        self._written.discard(key)
        self._versions[key] = parameter._version
        if holds_master_in_files(self._engine):
            raise _in_files(self._name_of(parameter))
        fragment = fragment_of(self._engine, parameter)
        is_changed = fragment is not None and _copy_to_master(fragment)
        if _is_everywhere(parameter):
            before = self._since_step.get(key)
            was_changed = before is not None and before.is_changed
            self._since_step[key] = Written(digest=_digest(parameter), is_changed=is_changed or was_changed)
        if fragment is not None and is_changed:
            self._changes.add(_CARRIED)
            carried_at = self._carried_at.setdefault(key, step)
            if carried_at != step and fragment.weights.dtype != fragment.master.dtype:
                raise _rounded(self._name_of(parameter), fragment.weights.dtype, carried_at, step)

    def take_written(self) -> Mapping[int, Written]:
        """Return what the script has written since the last call, by the parameter's id."""
        written, self._since_step = self._since_step, {}
        return written

    def _compare(self, step: int, named: Iterable[tuple[str, Any]]) -> None:
        if not self._is_comparable:
            return
        for name, parameter in named:
            fragment = fragment_of(self._engine, parameter)
            if fragment is not None and (differs := _differences(fragment)).any():
                raise _unexplained(name, step, int(differs.sum()), fragment.weights.numel())

    def _release(self, key: int) -> None:
        """Forget what `.data` returned of a parameter, and note whether it was written."""
        alias = self._aliases.pop(key, None)
        if alias is not None and alias._version:
            self._written.add(key)

    def _name_of(self, parameter: Any) -> str:
        return next(name for name, other in self._trained if other is parameter)


def _copy_to_master(fragment: Fragment) -> bool:
    """Copy the elements of which the weights are no rounding any more, and return whether there were any."""
    differs = _differences(fragment)
    if not differs.any():
        return False
    new = fragment.weights.to(fragment.master)
    fragment.master.copy_(new.where(differs.to(fragment.master.device), fragment.master))
    if fragment.shard is not None:
        fragment.shard.copy_(fragment.weights)
    return True


def _differences(fragment: Fragment) -> Any:
    """Return where the weights are not the rounding of the master copy, a tensor of bool; NaN equals NaN."""
    rounded = fragment.master.to(fragment.weights)
    both_nan = rounded.isnan() & fragment.weights.isnan()
    return (rounded != fragment.weights) & ~both_nan


def _is_everywhere(parameter: Any) -> bool:
    """Return True if each rank holds the whole weight now: not so for ZeRO-3's shards and for experts."""
    return is_gathered(parameter) and getattr(parameter, "allreduce", True)


def _digest(parameter: Any) -> int:
    """Return a number below 255 of a weight's bits, the same for the same weight on each rank."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]
    return int(parameter.detach().contiguous().view(integers).sum(dtype=torch.int64)) % 255


def _lost(name: str) -> UserError:
    return UserError(
        "weights-written-under-zero3",
        "the script writes a weight that ZeRO-3 holds in shards",
        found=f"{name}, written outside of deepspeed.zero.GatheredParameters",
        why="outside of it, or once a module's pass is over, no rank holds the whole weight, and what is "
        "written is lost without an error",
        fix="train without ZeRO-3: --zero-stage 2, or --engine native",
        see="https://deepspeed.readthedocs.io/en/latest/zero3.html#modifying-partitioned-states",
    )


def _in_files(name: str) -> UserError:
    return UserError(
        "weights-written-under-nvme-offload",
        "the script writes a weight whose master copy is in a file",
        found=f"{name}, with optimizer offload to NVMe",
        why="DeepSpeed steps the copy in its file and overwrites the weight from it",
        fix="train without offload to NVMe: --offload-optimizer cpu, or none",
    )


def _rounded(name: str, dtype: Any, first: int, step: int) -> UserError:
    return UserError(
        "weights-written-in-16-bits",
        "the script writes weights again and again, which ZeRO holds in 16 bits",
        found=f"{name} ({str(dtype).removeprefix('torch.')}), written after step {first} and after step "
        f"{step}",
        why="each time, what is written is rounded, and the fp32 copy that the optimizer steps loses its "
        "low bits; without ZeRO the weights are fp32",
        fix="train without ZeRO: --engine native; or in fp32: --mixed-precision no",
    )


def _other_shape(name: str, parameter: Any, tensor: Any) -> UserError:
    return UserError(
        "weights-replaced-under-zero",
        "the script gives a weight another shape, which ZeRO can't train",
        found=f"{name}.data = a tensor of {tuple(tensor.shape)}; it has {tuple(parameter.shape)}",
        why="ZeRO steps the weights in flat buffers, whose places are set when the model is prepared",
        fix="train without ZeRO: --engine native",
    )


def _unexplained(name: str, step: int, num_different: int, size: int) -> UserError:
    return UserError(
        "weights-differ-from-master-copy",
        "the model's weights are not what DeepSpeed's optimizer steps",
        found=f"{name} after step {step}: {num_different:,} of the {size:,} elements that this rank steps "
        "differ",
        why="the next step would overwrite them, so that the run would train differently than the script "
        "alone; nothing that zerofit knows has changed them (memory shared with NumPy, for example, is not "
        "seen)",
        fix="train without ZeRO: --engine native",
    )
