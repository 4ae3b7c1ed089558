"""Inputs of a forward pass that are split, and what forbids it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from transformers import BatchEncoding, BatchFeature

from zerofit.models.pieces import Inputs, SampleBatch, batch_of, taken


def _inputs(*args: Any, **kwargs: Any) -> Inputs:
    return Inputs(args=args, kwargs=kwargs)


class _Named(NamedTuple):
    ids: Any
    names: Any


_ids = torch.arange(12).reshape(4, 3)
_CASES = [
    (_inputs(_ids), SampleBatch(size=4)),
    (_inputs(input_ids=_ids, position_ids=torch.arange(3)[None], weight=torch.ones(5)), SampleBatch(size=4)),
    (_inputs({"input_ids": _ids}, None, 3), SampleBatch(size=4)),
    (
        _inputs(names=["a", "b"]),
        SampleBatch(size=1, whole_because="no argument has a batch dimension", is_countable=False),
    ),
    (
        _inputs(input_ids=_ids[:1], cu_seq_lens_q=torch.tensor([0, 2, 3])),
        SampleBatch(size=1, whole_because="samples are packed into one row (cu_seq_lens_q is passed)"),
    ),
    (
        _inputs(input_ids=_ids, pixel_values=torch.ones(9, 5)),
        SampleBatch(size=4, whole_because="pixel_values has 9 rows for 4 samples"),
    ),
    (
        _inputs(input_ids=_ids, inputs={"image_grid_thw": torch.ones(2, 3)}),
        SampleBatch(size=4, whole_because="image_grid_thw has 2 rows for 4 samples"),
    ),
    (_inputs(input_ids=_ids, pixel_values=torch.ones(4, 5)), SampleBatch(size=4)),
    (
        _inputs(inputs_embeds=torch.ones(4, 3, requires_grad=True)),
        SampleBatch(size=4, whole_because="inputs_embeds requires a gradient"),
    ),
    (
        _inputs(input_ids=_ids, past_key_values=object()),
        SampleBatch(size=4, whole_because="past_key_values are passed"),
    ),
]


@pytest.mark.parametrize(("inputs", "expected"), _CASES)
def test_the_batch(inputs: Inputs, expected: SampleBatch) -> None:
    assert batch_of(inputs) == expected


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


_TAKEN = [
    (_ids, [[3, 4, 5], [6, 7, 8]]),
    (torch.ones(2, 2), [[1, 1], [1, 1]]),
    (torch.tensor(3), 3),
    (["a", "b", "c", "d"], ["b", "c"]),
    (["a", "b"], ["a", "b"]),
    (3, 3),
    (None, None),
    ("abcd", "abcd"),
]


@pytest.mark.parametrize(("value", "expected"), _TAKEN)
def test_what_is_taken_of_one_argument(value: Any, expected: Any) -> None:
    for rows in (slice(1, 3), [1, 2]):
        piece = taken(_inputs(value, key=value), rows, of=4)
        assert _plain(piece.args[0]) == expected
        assert _plain(piece.kwargs["key"]) == expected


@pytest.mark.parametrize("kind", [dict, BatchEncoding, BatchFeature])
def test_mappings_keep_their_class(kind: Any) -> None:
    batch = kind({"input_ids": _ids, "inner": {"names": list("abcd"), "pair": (_ids, _ids)}})
    piece = taken(_inputs(batch), slice(0, 1), of=4).args[0]
    assert type(piece) is kind
    assert piece["input_ids"].tolist() == [[0, 1, 2]]
    assert piece["inner"]["names"] == ["a"]
    assert [one.tolist() for one in piece["inner"]["pair"]] == [[[0, 1, 2]]] * 2
    assert batch["input_ids"].shape == (4, 3)


def test_named_tuples_keep_their_class() -> None:
    piece = taken(_inputs(_Named(_ids, ["a", "b", "c", "d"])), slice(2, 4), of=4).args[0]
    assert isinstance(piece, _Named)
    assert piece.ids.shape == (2, 3)
    assert piece.names == ["c", "d"]


def test_pieces_are_views() -> None:
    piece = taken(_inputs(_ids), slice(1, 3), of=4).args[0]
    assert piece.untyped_storage().data_ptr() == _ids.untyped_storage().data_ptr()
