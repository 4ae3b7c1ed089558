"""The supported versions, and what the smoke tests showed on sets of them, as a page of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.supported import PYTHON, SUPPORTED

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEAD = """\
<!-- Written by `make docs` from zerofit/core/supported.py and from what `make test-versions` showed. -->
# Versions

`zerofit launch`, `generate` and `bench`, and every capture of a script, refuse a library outside of its range
before anything starts, and say so of a release that is newer than all that were tested. `zerofit plan` and
`config` refuse the libraries that trace a model. `zerofit check`, and `zerofit plan --fast` of a model of
the catalog, import none of them and work beside any; the keys that `zerofit check` knows are those of the
installed releases, or of the newest ones where none is installed.

| package | supported | newest tested |
|---|---|---|"""
_SMOKE = """
Why not older ones:

- **DeepSpeed 0.17.6 to 0.18.2** overwrite the gradients of all but the last micro-batch of an accumulation
  window under ZeRO-1 and 2, in silence (`runtime/zero/stage_1_and_2.py`), and before 0.18.3 the engine has no
  hooks for a script's own `loss.backward()`, which zerofit trains under.
- **transformers 4** needs huggingface_hub below 1, loads weights in fp32 unless told otherwise, and has other
  private functions in nearly every place that a capture stands in for: each would be a second way to do it.
- **Python 3.13**: nothing keeps it out, but no set of versions below was run on it.

On CPU ranks, DeepSpeed 0.18.3 to 0.19.0 (later ones up to 0.19.7 were not looked at) may use weights of
ZeRO-3 before they have come: it waits for the last of several gathers alone, which is enough on GPUs. zerofit
waits for all.

With transformers 5.0 and torch 2.8, experts run one by one, which can't be traced: `zerofit plan` of such a
model says so, and plans with `--fast`.

## What was run

`make test-versions` makes an environment of each set of versions in [versions/](../../versions), runs the
smoke tests of [tests/versions](../../tests/versions) there, on two CPU ranks, and keeps what they showed.
`make test-versions SETS="oldest newest"` names some of the sets.
"""


def versions_page(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page.

    Args:
        measured: what the smoke tests wrote, by set: the date, the versions, and a row a check.
    """
    ranges = [
        f"| {one.package} | `{one.specifier}` | {one.tested} |" for one in (PYTHON, *SUPPORTED.values())
    ]
    return "\n".join([_HEAD, *ranges, _SMOKE, *_table(measured), ""])


def _table(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    packages = ("python", *SUPPORTED)
    checks = dict.fromkeys(row["check"] for kept in measured.values() for row in kept["checks"])
    rows = [
        ["", *measured],
        ["---"] * (len(measured) + 1),
        *(
            [package, *(kept["versions"][package] or "none" for kept in measured.values())]
            for package in packages
        ),
        *([_words(check), *(_cell(kept, check) for kept in measured.values())] for check in checks),
        ["measured on", *(kept["measured_on"] for kept in measured.values())],
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def _words(check: str) -> str:
    """Return "example on two ranks: Trainer, ZeRO-3" of "example on two ranks[Trainer-ZeRO-3]"."""
    what, _, case = check.rstrip("]").partition("[")
    return f"{what}: {case.replace('-', ', ', 1)}" if case else what


def _cell(kept: Mapping[str, Any], check: str) -> str:
    row = next((row for row in kept["checks"] if row["check"] == check), None)
    if row is None:
        return "not run"
    return f"passed, {row['seconds']} s" if row["passed"] else "**failed**"
