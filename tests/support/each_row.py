"""One test of all rows of a table, which names each row that fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import TypeVar

_Row = TypeVar("_Row")


def in_each(
    rows: Iterable[_Row], name: Callable[[_Row], str]
) -> Callable[[Callable[[_Row], None]], Callable[[], None]]:
    """Return a decorator by which a test of one row looks at all; an error in one hides no other.

    A test of its own for each of some hundred rows takes longer to collect and report than to run.
    """

    def decorate(test: Callable[[_Row], None]) -> Callable[[], None]:
        def run() -> None:
            wrong = []
            for row in rows:
                try:
                    test(row)
                except Exception:
                    wrong.append(f"{name(row)}: {traceback.format_exc(limit=-1)}")
            assert not wrong, "\n".join(wrong)

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate
