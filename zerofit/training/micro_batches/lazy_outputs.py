"""Outputs of a transformers model whose parts are computed when the script looks at them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_PENDING = "_zerofit_pending"
_FETCH = "_zerofit_fetch"


class _LazyOutput:
    """Fetches a part before anything of ModelOutput's own can return it."""

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
                return tuple(dict.__getitem__(_as_dict(self), one) for one in chosen)
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
        """Let copies and pickles be of the plain class."""
        return _plain, (_plain_class(type(self)), dict(self.items()))


def _as_dict(lazy: Any) -> dict[str, Any]:
    """Return the same object, as what type checkers can't see that it is."""
    return lazy  # type: ignore[no-any-return]


def _plain_class(lazy_class: Any) -> Any:
    return lazy_class.__mro__[2]


def _plain(plain_class: Any, items: dict[str, Any]) -> Any:
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
    """True if a model gave a ModelOutput of transformers."""
    return isinstance(outputs, dict) and hasattr(outputs, "to_tuple")


def lazy_output(like: Any, keys: list[str], known: dict[str, Any], fetch: Callable[[str], Any]) -> Any:
    """Return an output of the class of another one, in which some parts are computed when looked at."""
    like_class: Any = type(like)
    output_class = _lazy_class(like_class)
    made = output_class.__new__(output_class)
    for key in keys:
        made[key] = known.get(key)
    object.__setattr__(made, _PENDING, {key for key in keys if key not in known})
    object.__setattr__(made, _FETCH, fetch)
    return made
