"""Made models and data: the same each time, and what scripts load by the hub's names."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import pytest
from made.data import save_data
from made.models import KINDS, save_model

if TYPE_CHECKING:
    from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_data_is_the_same_for_the_same_seed_alone(tmp_path: Path) -> None:
    first, again, other = (
        contents(save_data(tmp_path / name, num_train=6, num_validation=3, seed=seed))
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert first == again
    assert all(first[name] != other[name] for name in first)


def test_answers_stand_in_their_context_where_they_say(tmp_path: Path) -> None:
    text = (save_data(tmp_path / "data") / "answers_train.json").read_text()
    for sample in json.loads(text)["data"]:
        start, answer = sample["answers"]["answer_start"][0], sample["answers"]["text"][0]
        assert sample["context"][start : start + len(answer)] == answer


def test_pairs_have_both_labels(tmp_path: Path) -> None:
    with (save_data(tmp_path / "data") / "pairs_train.csv").open() as file:
        labels = [row["label"] for row in csv.DictReader(file)]
    assert {"0", "1"} == set(labels)
    assert min(labels.count("0"), labels.count("1")) > len(labels) / 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_the_same_for_the_same_seed_and_reads_its_tokens(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    first, again = (save_model(kind, tmp_path / name) for name in ("first", "again"))
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(first)
    assert tokenizer.pad_token_id is not None
    ids = tokenizer("Badan kogor lilen.")["input_ids"]
    assert 0 < len(ids) < 12
    assert max(ids) < AutoConfig.from_pretrained(first).vocab_size
