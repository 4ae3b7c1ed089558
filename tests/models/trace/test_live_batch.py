"""Batches in the form of one that a script's model was given, in other sizes and lengths."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.errors import UserError
from zerofit.models.trace.live_batch import live_batch
from zerofit.models.trace.nested import map_tensors, named_tensors

_REQUEST = TraceRequest(sequence_length=100, target_length=50)


def _tensor(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _shapes(given: dict[str, Any], samples: int, **options: Any) -> dict[str, tuple[int, ...]]:
    known = {"has_tokens": True, "has_decoder": False, "micro_batch_size": None, **options}
    batch = live_batch(((), given), **known)
    return {name[2:]: tuple(one.shape) for name, one in named_tensors(batch.feed(None, samples, _REQUEST))}


@pytest.mark.parametrize(
    ("given", "options", "expected"),
    [
        pytest.param(
            {"input_ids": (4, 16), "attention_mask": (4, 16), "labels": (4,)},
            {},
            {"input_ids": (3, 100), "attention_mask": (3, 100), "labels": (3,)},
            id="tokens with one label each",
        ),
        pytest.param(
            {"input_ids": (4, 5, 16), "mask": (4, 1, 16, 16)},
            {},
            {"input_ids": (3, 5, 100), "mask": (3, 1, 100, 100)},
            id="choices, and a square mask",
        ),
        pytest.param(
            {"input_ids": (4, 16), "labels": (4, 9), "decoder_input_ids": (4, 9)},
            {"has_decoder": True},
            {"input_ids": (3, 100), "labels": (3, 50), "decoder_input_ids": (3, 50)},
            id="a source and a target",
        ),
        pytest.param(
            {"input_ids": (4, 16), "labels": (4, 16)},
            {"has_decoder": True},
            {"input_ids": (3, 100), "labels": (3, 50)},
            id="a target as long as its source",
        ),
        pytest.param(
            {"input_ids": (4, 16), "pixel_values": (40, 64), "weights": (8,), "bias": (16,)},
            {},
            {"input_ids": (3, 100), "pixel_values": (30, 64), "weights": (8,), "bias": (100,)},
            id="several rows to a sample, and tensors that do not scale",
        ),
        pytest.param(
            {"pixel_values": (4, 3, 16, 16), "labels": (4,), "scale": ()},
            {"has_tokens": False},
            {"pixel_values": (3, 3, 16, 16), "labels": (3,), "scale": ()},
            id="images",
        ),
        pytest.param({"x": (4, 16)}, {}, {"x": (3, 100)}, id="tokens by another name"),
        pytest.param(
            {"input_ids": (4, 16), "more": (4, 16, 16), "position_ids": (16,), "pixel_mask": (4, 16, 16)},
            {},
            {"input_ids": (3, 100), "more": (3, 16, 100), "position_ids": (100,), "pixel_mask": (3, 16, 100)},
            id="of whole numbers by another name the last dimension",
        ),
        pytest.param(
            {"x": (7, 3)}, {"has_tokens": False, "has_samples": False}, {"x": (7, 3)}, id="one lump"
        ),
        pytest.param({"scale": ()}, {"has_tokens": False}, {"scale": ()}, id="nothing that has samples"),
    ],
)
def test_samples_and_lengths_are_the_requests(
    given: dict[str, tuple[int, ...]], options: dict[str, Any], expected: dict[str, tuple[int, ...]]
) -> None:
    assert _shapes({name: _tensor(*shape) for name, shape in given.items()}, 3, **options) == expected


_AS_LONG = [
    ("inputs_embeds", (4, 16, 16), (3, 100, 16)),
    ("decoder_inputs_embeds", (4, 16, 16), (3, 100, 16)),
    ("pixel_values", (4, 3, 16, 16), (3, 3, 16, 16)),
    ("teacher_embedding", (4, 16), (3, 16)),
    ("loss_mask", (4, 16), (3, 100)),
    ("scale", (16,), (16,)),
]


@pytest.mark.parametrize(("name", "shape", "expected"), _AS_LONG)
def test_numbers_that_are_as_many_as_the_tokens_by_chance_stay(
    name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    given = {"input_ids": _tensor(4, 16), name: _tensor(*shape, dtype=torch.float32)}
    assert _shapes(given, 3)[name] == expected


def test_formats_and_everything_else_stay() -> None:
    given = {
        "input_ids": _tensor(4, 16),
        "p": _tensor(4, 2, dtype=torch.bfloat16),
        "flag": True,
        "none": None,
    }
    batch = live_batch(((), given), has_tokens=True, has_decoder=False, micro_batch_size=4)
    _, made = batch.feed(None, 2, _REQUEST)
    assert (made["p"].dtype, made["flag"], made["none"]) == (torch.bfloat16, True, None)


@pytest.mark.parametrize("is_padded", [False, True])
def test_the_attention_mask_hides_what_the_request_says(is_padded: bool) -> None:
    given = {"input_ids": _tensor(4, 16), "attention_mask": _tensor(4, 16)}
    batch = live_batch(((), given), has_tokens=True, has_decoder=False, micro_batch_size=None)
    _, made = batch.feed(None, 2, TraceRequest(sequence_length=8, is_padded=is_padded))
    assert made["attention_mask"].tolist() == [[1] * 7 + [0 if is_padded else 1]] * 2


@pytest.mark.parametrize(
    ("given", "micro_batch_size", "found"),
    [
        ({"input_ids": (1, 64), "cu_seq_lens_q": (5,)}, None, "cu_seq_lens_q"),
        ({"input_ids": (1, 64), "seq_idx": (1, 64)}, None, "seq_idx"),
        ({"input_ids": (1, 64), "position_ids": (1, 64)}, 4, "4 samples in one row of 64 tokens"),
    ],
)
def test_samples_laid_end_to_end_are_refused(
    given: dict[str, tuple[int, ...]], micro_batch_size: int | None, found: str
) -> None:
    tensors = {name: _tensor(*shape) for name, shape in given.items()}
    with pytest.raises(UserError) as caught:
        live_batch(((), tensors), has_tokens=True, has_decoder=False, micro_batch_size=micro_batch_size)
    assert (caught.value.rule, caught.value.found) == ("trace-packed-batch", found)


@dataclass(frozen=True)
class _Batch:
    x: Any
    name: str


_Pair = namedtuple("_Pair", ["x", "y"])


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (_tensor(2), [""]),
        ([_tensor(2), (_tensor(3), "word")], ["0", "1.0"]),
        ({"a": {"b": _tensor(2)}}, ["a.b"]),
        (_Batch(x=_tensor(2), name="n"), ["x"]),
        (_Pair(_tensor(2), 1), ["x"]),
        (BatchEncoding({"input_ids": _tensor(2)}), ["input_ids"]),
    ],
)
def test_tensors_are_found_and_changed_in_containers(value: Any, names: list[str]) -> None:
    assert [name for name, _ in named_tensors(value)] == names
    changed = map_tensors(value, lambda _, tensor: tensor + 1)
    assert type(changed) is type(value)
    assert all(bool((tensor == 1).all()) for _, tensor in named_tensors(changed))
    assert all(bool((tensor == 0).all()) for _, tensor in named_tensors(value))
