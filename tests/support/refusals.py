"""Calls that zerofit refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.core.errors import UserError


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> UserError:
    """Return the error with which a call is refused."""
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    return caught.value
