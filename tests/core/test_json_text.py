"""JSON of files that are not zerofit's own."""

from __future__ import annotations

import json

import pytest

from zerofit.core.json_text import parse_json


@pytest.mark.parametrize("text", ['{"a": 1}', '["\\ud83d\\ude00"]', '["\\\\ud800"]', "1"])
def test_json_is_what_json_loads_makes_of_it(text: str) -> None:
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000 + "]" * 100_000, "mappings and lists are nested too deep"),
        ('{"text": "a\\ud800b"}', "A string contains a lone surrogate"),
        ('["\\uDC00"]', "A string contains a lone surrogate"),
        ("{", "Expecting property name enclosed in double quotes"),
    ],
)
def test_what_nothing_can_read_or_write_is_a_decode_error(text: str, says: str) -> None:
    with pytest.raises(json.JSONDecodeError) as error:
        parse_json(text)
    assert error.value.msg == says


def test_an_integer_of_too_many_digits_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="integer string conversion"):
        parse_json("9" * 5000)
