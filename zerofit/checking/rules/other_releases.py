"""What to do about a key that another release of the library has, and the one that will run has not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.supported import release_of

if TYPE_CHECKING:
    from zerofit.configs.schema import Schema


def fix_for_release(schema: Schema, *path: str) -> str | None:
    """Return the fix for a key that the schema lacks; None where no supported release is known to have it.

    Args:
        schema: the keys of the release that will run.
        path: of the key.
    """
    other = next((other for other in schema.other_releases if other.path == path), None)
    if other is None:
        return None
    package = schema.package
    if other.since and release_of(schema.version) < release_of(other.since):
        when = f"{package} has {path[-1]} since {other.since}"
        below = f", before {other.until}" if other.until else ""
        otherwise = f"leave it out, or install {package} {other.since} or later{below}"
    else:
        when = f"{package} {other.until} dropped {path[-1]}"
        otherwise = f"leave it out: {when}"
    return f"write {other.instead}: {when}" if other.instead else otherwise
