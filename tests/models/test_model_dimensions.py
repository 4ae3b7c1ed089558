"""How long a sample a model takes."""

from __future__ import annotations

import pytest

from zerofit.core.errors import UserError
from zerofit.models.dimensions import check_sequence_length
from zerofit.models.find import probe_model


@pytest.mark.parametrize(
    ("name", "sequence_length", "target_length", "flag"),
    [
        ("bert-base-uncased", 512, None, None),
        ("bert-base-uncased", 513, None, "--seq-len 513"),
        ("roberta-base", 513, None, "--seq-len 513"),
        ("bert-base-uncased", 512, 600, None),  # no decoder: a target's length means nothing
        ("bart-large", 512, 1025, "--target-len 1025"),
        ("t5-base", 10**6, 10**6, None),
        ("vit-base", 10**6, None, None),
        ("gpt2", None, None, None),
    ],
)
def test_samples_and_targets_must_fit_the_positions(
    name: str, sequence_length: int | None, target_length: int | None, flag: str | None
) -> None:
    facts = probe_model(name).facts
    if flag is None:
        check_sequence_length(facts, sequence_length, target_length)
        return
    with pytest.raises(UserError) as caught:
        check_sequence_length(facts, sequence_length, target_length)
    most = facts.max_sequence_length
    assert str(caught.value) == (
        "error[sequence-too-long]: the samples are longer than the model's positions\n"
        f"  found: {flag} with --model {name}\n"
        f"  why:   it has {most} positions, and fails or trains nonsense beyond them\n"
        f"  fix:   give {flag.split()[0]} {most} or less"
    )
