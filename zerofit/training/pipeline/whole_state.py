"""WholeStates: gathers weights and optimizer states of all stages for saving, and splits loaded ones."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerofit.core.errors import UserError
from zerofit.ranks.meeting import Advice, meet
from zerofit.ranks.script_line import script_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zerofit.training.pipeline.pipeline import Pipeline

_Name = tuple[int, str]
"""A parameter's index in the whole model, and its name."""
_GROUPS = "groups"
"""Key of the parameter names by group, in a dict of an optimizer's states."""
_SAVING = Advice(
    rule="pipeline-saves-on-all-ranks",
    why="each rank only holds the weights of its own blocks, and rank 0 gathers them from all",
    fix="call it on all ranks, outside of `if accelerator.is_main_process`; rank 0 alone writes",
)


@dataclass(frozen=True, slots=True)
class _TensorHeader:
    """Shape and dtype of a tensor that another rank sends next."""

    shape: torch.Size
    dtype: torch.dtype


class WholeStates:
    """Gathers a pipeline's states on rank 0 for saving, and loads each rank's part of whole states.

    Checkpoints are therefore those of one process, which any number of stages can resume.
    """

    def __init__(self, pipeline: Pipeline, *, limit_s: float) -> None:
        """Replace the model's methods that save and load.

        Args:
            pipeline: the model's.
            limit_s: how long a rank that saves waits for the others.
        """
        self.pipeline = pipeline
        self._limit_s = limit_s
        self._weights: OrderedDict[str, Any] | None = None
        self._optimizers: list[tuple[Any, list[list[_Name]]]] = []
        self._optimizer_states: dict[int, dict[str, Any]] = {}
        self._wrap_model(pipeline.model)

    def cut_optimizer(self, optimizer: Any) -> None:
        """Remove other ranks' parameters from an optimizer.

        Args:
            optimizer: torch's, created from the whole model or from this rank's stages.
        """
        if any(known is optimizer for known, _ in self._optimizers):
            return
        self._check_parameters(optimizer, optimizer.param_groups)
        names = [self._cut_group(group) for group in optimizer.param_groups]
        self._optimizers.append((optimizer, names))

    def _check_parameters(self, optimizer: Any, groups: list[dict[str, Any]]) -> None:
        if not all(self.has(parameter) for group in groups for parameter in group["params"]):
            raise UserError(
                "pipeline-foreign-parameters",
                "an optimizer of a pipeline may only hold parameters of its model",
                found=f"{type(optimizer).__name__} with parameters outside "
                f"{type(self.pipeline.model).__name__}",
                why="they are on no stage, so their gradients are neither averaged nor clipped with the rest",
                fix="use a separate optimizer for them that accelerator.prepare() does not get, or train "
                "without --pipeline-parallel-size",
            )

    def _cut_group(self, group: dict[str, Any]) -> list[_Name]:
        """Remove other ranks' parameters from a group of an optimizer, and return the names of all."""
        own = {id(parameter) for parameter in self.pipeline.model.parameters()}
        names = [_name_of(parameter) for parameter in group["params"]]
        group["params"][:] = [parameter for parameter in group["params"] if id(parameter) in own]
        return names

    def wrap_optimizers(self) -> None:
        """Make optimizers save and load the states of all stages.

        To be called after accelerate has prepared them, which saves and loads a state to move it to the GPU.
        """
        for key, (optimizer, _) in enumerate(self._optimizers):
            if "load_state_dict" not in vars(optimizer):
                self._wrap_optimizer(key, optimizer)

    def _wrap_optimizer(self, key: int, optimizer: Any) -> None:
        plain, add = optimizer.state_dict, optimizer.add_param_group

        def state_dict(_: Any, *args: Any, **kwargs: Any) -> Any:
            return self._optimizer_states.get(key) or plain(*args, **kwargs)

        def load_state_dict(_: Any, state_dict: Any) -> Any:
            return type(optimizer).load_state_dict(optimizer, self._own_part(key, state_dict))

        def add_param_group(_: Any, param_group: dict[str, Any]) -> None:
            names = self._optimizers[key][1]
            add(param_group)
            group = optimizer.param_groups[-1]
            try:
                self._check_parameters(optimizer, [group])
                if {*map(_name_of, group["params"])} & {name for earlier in names for name in earlier}:
                    raise ValueError("some parameters appear in more than one parameter group")  # as torch
            except (UserError, ValueError):
                del optimizer.param_groups[-1]
                raise
            names.append(self._cut_group(group))

        optimizer.state_dict = MethodType(state_dict, optimizer)
        optimizer.add_param_group = MethodType(add_param_group, optimizer)
        optimizer.load_state_dict = MethodType(load_state_dict, optimizer)

    def has(self, parameter: Any) -> bool:
        """Return True for a parameter of any stage of the model."""
        return hasattr(parameter, "_zerofit_name")

    def weights(self, call: str) -> OrderedDict[str, Any]:
        """Return the weights of all stages on rank 0, and an empty dict on the others; all ranks call it.

        Args:
            call: the script's call, for messages.

        Raises:
            UserError: not all ranks call it.
        """
        if self._weights is not None:
            return self._weights.copy()
        model, groups = self.pipeline.model, self.pipeline.groups
        if groups.first_rank == 0:
            meet(call, line=script_line(), limit_s=self._limit_s, ranks=groups.ranks, advice=_SAVING)
        found: OrderedDict[str, Any] = OrderedDict()  # accelerate drops tied names when it saves
        for part in self._gather(type(model).state_dict(model)):
            found.update({name: value for name, value in part.items() if name not in found})
        for name, first in self._tied_names(found):
            found[name] = found[first]
        return found

    @contextlib.contextmanager
    def gathered(self, call: str, *, optimizers: bool) -> Iterator[None]:
        """Make state_dict() of model and optimizers return whole states on rank 0; all ranks enter it.

        Args:
            call: the script's call, for messages.
            optimizers: whether to gather optimizer states beside the weights.
        """
        is_outermost = self._weights is None
        if is_outermost:
            self._weights = self.weights(call)
        if optimizers and not self._optimizer_states:
            for key in range(len(self._optimizers)):
                if whole := self._whole_optimizer(key):
                    self._optimizer_states[key] = whole
        try:
            yield
        finally:
            if is_outermost:
                self._weights = None
                self._optimizer_states.clear()

    def _wrap_model(self, model: Any) -> None:
        kind = type(model)

        def state_dict(used: Any, *args: Any, **kwargs: Any) -> Any:
            whole = self._weights if used is model else None
            return whole.copy() if whole else kind.state_dict(used, *args, **kwargs)

        def load_state_dict(used: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
            own = kind.state_dict(used).keys()
            part = {name: value for name, value in state_dict.items() if name in own}
            return kind.load_state_dict(used, part, *args, **kwargs)

        def save_pretrained(used: Any, *args: Any, **kwargs: Any) -> Any:
            if used is not model and kwargs.get("state_dict") is None:
                raise UserError(
                    "pipeline-saves-a-part",
                    "this would only save the weights of one rank",
                    found=f"save_pretrained() of a copy of the {kind.__name__} that trains",
                    why="a copy only holds the weights of its rank's stages",
                    fix="save the model itself, on all ranks",
                )
            if kwargs.get("state_dict") is None:
                kwargs["state_dict"] = self.weights("model.save_pretrained")
            return kind.save_pretrained(used, *args, **kwargs) if dist.get_rank() == 0 else None

        for name, method in (
            ("state_dict", state_dict),
            ("load_state_dict", load_state_dict),
            ("save_pretrained", save_pretrained),
        ):
            vars(model)[name] = MethodType(method, model)

    def _tied_names(self, found: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the tied weights' names, each with the name that it is tied to."""
        model = self.pipeline.model
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        return [(name, first) for name, first in dict(tied).items() if first in found]

    def _gather(self, own: Mapping[Any, Any]) -> list[dict[Any, Any]]:
        """Return on rank 0 what each rank of the first pipeline holds; an empty list on other ranks.

        Tensors are sent one by one through host memory: as one object they would need several times their
        size on a GPU.

        Args:
            own: tensors and other values of this rank, by name.
        """
        groups = self.pipeline.groups
        if groups.first_rank != 0:
            return []
        described = [
            (name, _TensorHeader(value.shape, value.dtype) if isinstance(value, torch.Tensor) else value)
            for name, value in own.items()
        ]
        received: list[Any] | None = [None] * groups.num_ranks if groups.place == 0 else None
        dist.gather_object(described, received, dst=0, group=groups.host)
        if received is None:
            for value in own.values():
                if isinstance(value, torch.Tensor):
                    dist.send(value.detach().cpu().contiguous(), 0, group=groups.host)
            return []
        found = [_on_host(own)]
        for rank, part in zip(groups.ranks[1:], received[1:], strict=True):
            found.append({name: _received(value, rank, groups.host) for name, value in part})
        return found

    def _whole_optimizer(self, key: int) -> dict[str, Any] | None:
        optimizer, names = self._optimizers[key]
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        states = {
            (_name_of(parameter), entry): value
            for parameter in own
            for entry, value in optimizer.state.get(parameter, {}).items()
        }
        parts = self._gather({**states, _GROUPS: names})
        if not parts:
            return None
        groups = self._whole_groups([part.pop(_GROUPS) for part in parts])
        numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
        merged: dict[int, dict[str, Any]] = {}
        for part in parts:
            for (name, entry), value in part.items():
                merged.setdefault(numbers[name], {})[entry] = value
        whole = [
            {**group, "params": [numbers[name] for name in names]}
            for group, names in zip(optimizer.param_groups, groups, strict=True)
        ]
        return {"state": dict(sorted(merged.items())), "param_groups": whole}

    def _whole_groups(self, parts: list[list[list[_Name]]]) -> list[list[_Name]]:
        """Return the parameters of each group over all stages, in the model's order, tied ones once.

        An optimizer created from the whole model names the same on all stages, and keeps its order.
        """
        if all(part == parts[0] for part in parts):
            return parts[0]
        return [sorted({name for part in parts for name in part[place]}) for place in range(len(parts[0]))]

    def _own_part(self, key: int, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of an optimizer's whole state, with its own parameter indices."""
        optimizer, _ = self._optimizers[key]
        parts: list[Any] = [None] * self.pipeline.groups.num_ranks
        dist.all_gather_object(parts, self._optimizers[key][1], group=self.pipeline.groups.host)
        groups = self._whole_groups(parts)
        _check_groups(groups, whole["param_groups"])
        saved = {
            name: number
            for names, group in zip(groups, whole["param_groups"], strict=True)
            for name, number in zip(names, group["params"], strict=True)
        }
        state, settings, place = {}, [], 0
        for own, group in zip(optimizer.param_groups, whole["param_groups"], strict=True):
            numbers = []
            for parameter in own["params"]:
                number = saved[_name_of(parameter)]
                if number in whole["state"]:
                    state[place] = whole["state"][number]
                numbers.append(place)
                place += 1
            settings.append({**group, "params": numbers})
        return {"state": state, "param_groups": settings}


def _check_groups(groups: list[list[_Name]], saved: list[dict[str, Any]]) -> None:
    """Check that a saved state has the groups of the whole optimizer.

    Raises:
        ValueError: it does not; the message is torch's (torch/optim/optimizer.py, load_state_dict).
    """
    if len(groups) != len(saved):
        raise ValueError("loaded state dict has a different number of parameter groups")
    if [len(names) for names in groups] != [len(group["params"]) for group in saved]:
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
        )


def name_parameters(model: Any) -> None:
    """Store in each parameter of a whole model its index and name; the first name of tied ones."""
    for place, (name, parameter) in enumerate(model.named_parameters()):
        parameter._zerofit_name = (place, name)


def _name_of(parameter: Any) -> _Name:
    name: _Name = parameter._zerofit_name
    return name


def _on_host(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _received(value: Any, rank: int, group: Any) -> Any:
    if not isinstance(value, _TensorHeader):
        return value
    tensor = torch.empty(value.shape, dtype=value.dtype)
    dist.recv(tensor, rank, group=group)
    return tensor
