"""Does not step parameters without a gradient under ZeRO, as torch's optimizers do not.

ZeRO steps flat buffers of many parameters: those without a gradient get zeros in it, and so weight decay and
momentum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.zero_fragments import (
    counts_steps,
    fragment_of,
    has_unsplit_states,
    holds_master_in_files,
    zero_gradient,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerofit.training.changes import Changes
    from zerofit.training.step.deepspeed.script_weights import Written

_NOT_STEPPED = "parameters without a gradient are not stepped, as by torch; ZeRO would decay and move them"


class UntrainedParameters:
    """Which parameters of one engine have got gradients on any rank since the last step."""

    def __init__(self, engine: Any, trained: Sequence[tuple[str, Any]], changes: Changes) -> None:
        self._engine = engine
        self._trained = trained
        self._changes = changes
        self._without = set(range(len(trained)))
        """Indices of the parameters without a gradient on this rank since the last step."""
        self._without_anywhere: list[int] | None = None
        """The same over all ranks; None before they are asked in a step."""
        self._skipped: dict[int, int] = {}
        """How many steps were made without each parameter."""
        self._keeps_zeros = False
        """True if the script zeroes gradients, so that parameters keep them."""
        self._had: set[int] = set()
        """Parameters that have ever had a gradient."""
        self._saved: list[tuple[Any, Any]] = []
        self._flags: Any = None
        self._asked: Any = None
        self._last: list[int] = []
        self.has_changed = False
        """True if the last step left out other parameters than the one before."""
        for place, (_, parameter) in enumerate(trained):

            def receive(_: Any, place: int = place) -> None:
                self._without.discard(place)

            parameter.register_post_accumulate_grad_hook(receive)

    def discard(self) -> None:
        """Handle the script's zero_grad(), which discards the gradients so far."""
        self._without = set(range(len(self._trained)))

    def keep_zeros(self) -> None:
        """Handle zero_grad(set_to_none=False): a parameter that had a gradient is stepped with zeros."""
        self._keeps_zeros = True

    def begin_step(self, num_steps: int, written: Mapping[int, Written]) -> None:
        """Ask all ranks for their gradients and for the weights that they wrote, before the engine steps.

        Args:
            num_steps: done so far.
            written: what the script has written on this rank since the last step, by the parameter's id.

        Raises:
            UserError: a parameter trains again, or for the first time, whose own count of steps ZeRO lacks;
                or another rank has not written what this one has.
        """
        import torch.distributed as dist

        for place in self._without:
            zero_gradient(self._engine, self._trained[place][1])
        if self._keeps_zeros:
            self._without -= self._had
        late = next((place for place in self._skipped if place not in self._without), None)
        if late is not None and counts_steps(self._engine):
            raise _trains_late(self._trained[late][0], num_steps + 1, self._skipped[late])
        self._had |= set(range(len(self._trained))) - self._without
        self._without_anywhere = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            rows = self._rows(written)
            self._flags = rows.to(self._engine.device, copy=True)
            # Not waited for unless this rank lacks a gradient or has written weights.
            self._asked = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, async_op=True)
            if any(weight.is_changed for weight in written.values()):
                self._asked.wait()
                self._check_all_wrote(num_steps, rows, self._flags, written)

    def check_written(self, num_steps: int, written: Mapping[int, Written]) -> None:
        """Check that all ranks have written the same, before they save it; all ranks call it.

        Raises:
            UserError: another rank has not written what this one has.
        """
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_world_size() > 1:
            rows = self._rows(written)
            flags = rows.to(self._engine.device, copy=True)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
            self._check_all_wrote(num_steps, rows, flags, written)

    def _rows(self, written: Mapping[int, Written]) -> Any:
        """Return, for each trained parameter: has a gradient; is not written; its digest, from both ends.

        Where the largest of all ranks equal a rank's own, all of them wrote the same.
        """
        import torch

        rows = torch.tensor([1, 1, 0, 0], dtype=torch.uint8).repeat(len(self._trained), 1)
        rows[sorted(self._without), 0] = 0
        for place, (_, parameter) in enumerate(self._trained if written else ()):
            if (weight := written.get(id(parameter))) is not None:
                rows[place, 1:] = torch.tensor([0, weight.digest, 254 - weight.digest])
        return rows

    def _check_all_wrote(self, num_steps: int, rows: Any, flags: Any, written: Mapping[int, Written]) -> None:
        largest = flags.to(rows.device)
        for place in (rows != largest)[:, 1:].any(1).nonzero().flatten().tolist():
            name, parameter = self._trained[place]
            weight = written.get(id(parameter))
            if weight is not None and weight.is_changed:
                raise _written_otherwise(name, num_steps, is_missing=bool(largest[place, 1]))

    def save(self) -> None:
        """Keep the fragments of parameters without a gradient, before the base optimizer steps."""
        self._saved = []
        if not self._without:
            return
        if self._without_anywhere is None:
            self._without_anywhere = self._ask()
            for place in self._without_anywhere:
                self._skipped[place] = self._skipped.get(place, 0) + 1
            if self._without_anywhere:
                self._changes.add(_NOT_STEPPED)
        for place in self._without_anywhere:
            name, parameter = self._trained[place]
            if holds_master_in_files(self._engine):
                raise _has_blocks(name, "states in files of NVMe offload")
            fragment = fragment_of(self._engine, parameter)
            if fragment is None:
                continue
            if has_unsplit_states(self._engine):
                raise _has_blocks(name, "8-bit states")
            for tensor in (fragment.master, *fragment.states):
                self._saved.append((tensor, tensor.clone()))

    def restore(self) -> None:
        """Undo what the base optimizer's step did to them, before ZeRO copies the weights back."""
        for tensor, before in self._saved:
            tensor.copy_(before)
        self._saved = []

    def end_step(self) -> None:
        """Begin the next window."""
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
        self._without = set(range(len(self._trained)))
        left_out = self._without_anywhere or []
        self.has_changed, self._last = left_out != self._last, left_out

    def _ask(self) -> list[int]:
        if self._asked is None:
            return sorted(self._without)
        self._asked.wait()
        return [place for place, has in enumerate(self._flags[:, 0].tolist()) if not has]


def _trains_late(name: str, step: int, num_skipped: int) -> UserError:
    return UserError(
        "parameter-trains-late-under-zero",
        "a parameter gets a gradient after steps without one, which ZeRO trains differently",
        found=f"{name} in step {step}, after {num_skipped} without a gradient",
        why="the optimizer corrects its steps by their number, which ZeRO counts for all parameters "
        "together and torch for each",
        fix="train without ZeRO: --engine native",
    )


def _written_otherwise(name: str, step: int, *, is_missing: bool) -> UserError:
    how = "by some ranks only" if is_missing else "differently by each rank"
    return UserError(
        "weights-written-by-one-rank",
        "the script writes weights that are not the same on all ranks, which ZeRO would mix",
        found=f"{name}, written after step {step} {how}",
        why="each rank steps its own slice of the weights and gets the other slices from the other ranks: of "
        "what one rank wrote, its slice would be kept",
        fix="write the same on every rank: keep the average on all of them, or broadcast it first; or train "
        "on one process. Without ZeRO the ranks would train different models",
    )


def _has_blocks(name: str, what: str) -> UserError:
    return UserError(
        "parameter-without-gradient-under-zero",
        "a parameter gets no gradient, and its optimizer states can't be kept apart under ZeRO",
        found=f"{name}, with {what}",
        why="ZeRO would decay and move it with the others; a scale of 8-bit states belongs to a block of "
        "several parameters, and files are written whole",
        fix="freeze the parameter before the optimizer is made, or use an optimizer with 32-bit states",
    )
