"""The outputs of a split forward pass, computed when the script reads them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.models.trees import leaves, replaced
from zerofit.training.batch.micro_batches.joiner import Joiner, NotJoinableError, detached_outputs, name_of
from zerofit.training.batch.micro_batches.pending_backward import Token
from zerofit.training.batch.micro_batches.random_state import unchanged_random_state
from zerofit.training.batch.micro_batches.separability import not_separable
from zerofit.training.batch.micro_batches.weights import normalized

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.models.trees import Path
    from zerofit.training.batch.micro_batches.pending_backward import PendingBackward, SplitPass

_PENDING = "_zerofit_pending"
_FETCH = "_zerofit_fetch"


class Outputs:
    """Collects the micro-batches' outputs and joins them.

    Of a ModelOutput only scalars are kept, and outputs that the script has read before: logits of all samples
    may be larger than the activations of one micro-batch. Outputs read for the first time are recomputed, or
    were stored in host memory if a rank can't recompute them alone.
    """

    def __init__(self, split_pass: SplitPass, *, stores_unread: bool) -> None:
        self._pass = split_pass
        self._model = split_pass.model
        self._stores_unread = stores_unread
        self._like: Any = None
        self._kept: dict[int, dict[Any, Any]] = {}
        self._unread: dict[int, dict[Any, tuple[Any, Any]]] = {}
        """(device, value on the host)"""

    def keep(self, place: int, outputs: Any) -> None:
        """Store one micro-batch's needed outputs, without graph."""
        for path, leaf in leaves(outputs):
            if _is_scalar(leaf):
                self._check_scalar(path, leaf)
                self._model.scalars.add(path)
        if not is_model_output(outputs):
            self._kept[place] = {None: _detached(outputs)}
            return
        kept = [key for key in outputs if key in self._model.read_keys or _is_scalar(outputs[key])]
        self._kept[place] = {key: _detached(outputs[key]) for key in kept}
        if self._stores_unread:
            rest = [key for key in outputs if key not in kept]
            self._unread[place] = {
                key: (_device_of(outputs[key]), _detached(outputs[key], device="cpu")) for key in rest
            }
        if self._like is None:
            self._like = outputs

    def _check_scalar(self, path: Path, leaf: Any) -> None:
        """Check that a scalar was also returned in evaluation mode, in which separability was checked.

        A loss that is only computed in training may depend on all samples of a batch together.
        """
        seen = self._pass.checked_scalars
        if seen is not None and path not in seen and leaf.is_floating_point():
            raise not_separable(
                f"{name_of(path)}, which the model only returns in training",
                why="it can only be checked in evaluation mode, without dropout",
            )

    def detached_outputs(self, pending: PendingBackward) -> Any:
        """Return the joined outputs, whose gradients are passed to `pending`."""
        import torch

        self._pending, token = pending, Token()
        self._pass.anchor = torch.zeros((), requires_grad=True)
        pending.add(self._pass, token)
        self._token = token
        like, kept = self._like, self._kept
        self._like, self._kept = None, {}
        known = self._joined(kept)
        if not is_model_output(like):
            return known[None]
        return lazy_output(like, list(like), known, self._fetch)

    def _fetch(self, key: Any) -> Any:
        """Return an output that the script reads for the first time."""
        self._model.read_keys.add(key)
        kept = {}
        if not self._model.can_run_alone:
            if not self._stores_unread:
                raise _read_too_late(key)
            for place, unread in self._unread.items():
                device, value = unread.pop(key)
                kept[place] = {key: _detached(value, device=device)}
            return self._joined(kept)[key]
        with unchanged_random_state(self._model.devices):
            for place in self._pass.order:
                kept[place] = {key: _detached(self._pass.run_again(place, with_gradient=False)[key])}
        return self._joined(kept)[key]

    def _joined(self, kept: dict[int, dict[Any, Any]]) -> dict[Any, Any]:
        import torch

        # The graph must not reference self.
        split_pass, pending, token = self._pass, self._pending, self._token
        sizes = [piece.size for piece in split_pass.pieces]
        weights = normalized(sizes, sizes)
        joiner = Joiner(
            sizes, lambda path: split_pass.weights_of(path) if path in self._model.scalars else weights
        )
        parts = [kept[place] for place in range(len(split_pass.pieces))]
        by_path = [
            {_whole_path(key, path): leaf for key in part for path, leaf in leaves(part[key])}
            for part in parts
        ]
        values = {}
        for path in by_path[0]:
            try:
                values[path] = joiner.join(path, [part.get(path) for part in by_path])
            except NotJoinableError as error:
                raise not_separable(str(error), why="the script reads this output") from None
        paths = [
            path for path, value in values.items() if torch.is_tensor(value) and value.is_floating_point()
        ]
        if paths:

            def receive(gradients: tuple[Any, ...], token: Token = token) -> None:
                pending.receive(split_pass, paths, gradients)

            tensors = detached_outputs(split_pass.anchor, receive, [values[path] for path in paths])
            values |= dict(zip(paths, tensors, strict=True))
        return {key: _rebuilt(key, part, values) for key, part in parts[0].items()}


def _rebuilt(key: Any, part: Any, values: dict[Path, Any]) -> Any:
    return replaced(part, lambda path, _: values[_whole_path(key, path)])


def _whole_path(key: Any, path: Path) -> Path:
    return path if key is None else (key, *path)


def _is_scalar(leaf: Any) -> bool:
    import torch

    return bool(torch.is_tensor(leaf) and leaf.dim() == 0)


def _detached(value: Any, *, device: Any = None) -> Any:
    """Return outputs without graph, and without objects such as a KV cache."""
    import torch

    return replaced(
        value, lambda _, leaf: leaf.detach().to(device) if torch.is_tensor(leaf) else _plain(leaf)
    )


def _device_of(value: Any) -> Any:
    """Return the device of the first tensor in an output, or None."""
    import torch

    return next((leaf.device for _, leaf in leaves(value) if torch.is_tensor(leaf)), None)


def _read_too_late(key: Any) -> UserError:
    return UserError(
        "output-read-late",
        "an output of the model is read for the first time long after training began",
        found=f"outputs.{key}",
        why="unread outputs are not stored, to save memory, and under ZeRO-3 or FSDP a rank can't recompute "
        "them alone",
        fix="also read it in the first training steps, or plan with the script's own batch size"
        " (--micro-batch-size)",
    )


def _plain(leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, (bool, int, float, str)) else None


class _LazyOutput:
    """A ModelOutput that computes an output when it is read."""

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "__dict__").get(_PENDING, ()):
            _fetch(self, (name,))
        return super().__getattribute__(name)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            _fetch(self, (key,))
        else:
            chosen = list(_as_dict(self))[key]
            _fetch(self, (chosen,) if isinstance(chosen, str) else chosen)
            if isinstance(chosen, list):
                return tuple(dict.__getitem__(_as_dict(self), name) for name in chosen)
            key = chosen
        return dict.__getitem__(_as_dict(self), key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if dict.__contains__(_as_dict(self), key) else default

    def items(self) -> Any:
        _fetch_all(self)
        return super().items()  # type: ignore[misc]

    def values(self) -> Any:
        _fetch_all(self)
        return super().values()  # type: ignore[misc]

    def __repr__(self) -> str:
        _fetch_all(self)
        return super().__repr__()

    def __reduce__(self) -> Any:
        """Copy and pickle as the plain class."""
        plain_class = type(self).__mro__[2]
        return _made_of, (plain_class, dict(self.items()))


def _as_dict(lazy: Any) -> dict[str, Any]:
    return lazy  # type: ignore[no-any-return]


def _made_of(plain_class: Any, items: dict[str, Any]) -> Any:
    return plain_class(**items)


def _fetch_all(lazy: Any) -> None:
    _fetch(lazy, tuple(object.__getattribute__(lazy, "__dict__").get(_PENDING, ())))


def _fetch(lazy: Any, keys: tuple[str, ...] | list[str]) -> None:
    own = object.__getattribute__(lazy, "__dict__")
    pending, fetch = own.get(_PENDING, set()), own.get(_FETCH)
    for key in keys:
        if key in pending:
            value = fetch(key)
            pending.discard(key)
            lazy[key] = value


@functools.cache
def _lazy_class(output_class: Any) -> Any:
    named = {"__module__": output_class.__module__, "__qualname__": output_class.__qualname__}
    return type(output_class.__name__, (_LazyOutput, output_class), named)


def is_model_output(outputs: Any) -> bool:
    """Return True for transformers' ModelOutput."""
    return isinstance(outputs, dict) and hasattr(outputs, "to_tuple")


def lazy_output(like: Any, keys: list[str], known: dict[str, Any], fetch: Callable[[str], Any]) -> Any:
    """Return a ModelOutput of the same class whose unknown values are computed on access."""
    like_class: Any = type(like)
    output_class = _lazy_class(like_class)
    made = output_class.__new__(output_class)
    for key in keys:
        made[key] = known.get(key)
    object.__setattr__(made, _PENDING, {key for key in keys if key not in known})
    object.__setattr__(made, _FETCH, fetch)
    return made
