"""Results of cases on ranks, many of which one launch runs: quick ones in one, slow ones in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class GroupedResults(dict[str, Any]):
    """Results by case; a group of cases is run when a result of one of them is first looked up.

    Args:
        run: runs cases, and returns their results.
        groups: cases that are run together.
    """

    def __init__(self, run: Callable[..., Mapping[str, Any]], *groups: tuple[str, ...]) -> None:
        super().__init__()
        self._run = run
        self._groups = groups

    def __missing__(self, case: str) -> Any:
        (group,) = (group for group in self._groups if case in group)
        self.update(self._run(*group))
        return self[case]
