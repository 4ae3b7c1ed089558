"""Ladders to JSON and back, and files that are none."""

from __future__ import annotations

import json

import pytest
from ladders import not_counted, on_cpu, on_gpu

from zerofit.core.errors import UserError
from zerofit.measuring.results import ladder_from_json, ladder_to_json, peak_of


def test_a_ladder_comes_back_from_its_json_as_it_was() -> None:
    for ladder in (on_cpu(), on_gpu(), not_counted()):
        assert ladder_from_json(ladder_to_json(ladder), name="ladder.json") == ladder


def test_rungs_are_compared_by_torchs_peak_on_a_gpu_and_by_the_process_elsewhere() -> None:
    for ladder, field in ((on_cpu(), "process_bytes"), (on_gpu(), "allocated_bytes")):
        measured = ladder.rungs[0].measured
        assert measured is not None
        assert peak_of(measured) == getattr(measured, field)


_PLAIN = json.loads(ladder_to_json(on_cpu()))


@pytest.mark.parametrize(
    ("text", "found", "why"),
    [
        (
            "{",
            "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
            "it is not whole JSON",
        ),
        ("[]", "version None", "this zerofit reads ladders of version 1"),
        (json.dumps({**_PLAIN, "version": 2}), "version 2", "this zerofit reads ladders of version 1"),
        (
            json.dumps({**_PLAIN, "note": ""}),
            "note: Unexpected keyword argument",
            "every field must be known and of its type",
        ),
    ],
)
def test_a_file_that_is_no_ladder(text: str, found: str, why: str) -> None:
    with pytest.raises(UserError) as raised:
        ladder_from_json(text, name="ladder.json")
    assert str(raised.value) == (
        "error[ladder-file-broken]: the file of a ladder can't be read\n"
        f"  found: {found}   (ladder.json)\n"
        f"  why:   {why}\n"
        "  fix:   measure it anew: zerofit bench ladder --json"
    )


_NEW = {
    "measured": {"device_process_bytes", "device_used_bytes", "context_bytes"},
    "predicted": {"step_time_s"},
}
"""Fields that came after the first files."""


_NEW_ON_TOP = {"num_ranks"}
"""Those of the whole file."""


def _without_new(value: object) -> object:
    if isinstance(value, list):
        return [_without_new(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: {key: one for key, one in inner.items() if key not in _NEW[name]}
        if name in _NEW and isinstance(inner, dict)
        else _without_new(inner)
        for name, inner in value.items()
    }


def test_a_file_of_before_reads_as_one_without_what_is_new() -> None:
    document = json.loads(ladder_to_json(on_gpu()))
    plain = {name: value for name, value in document.items() if name not in _NEW_ON_TOP}
    assert plain.keys() | _NEW_ON_TOP == document.keys()
    old = _without_new(plain)
    assert old != document
    assert ladder_from_json(json.dumps(old), name="ladder.json") == on_gpu()
