"""What docs/collators.md says of the collators of transformers, and of zerofit's own."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import transformers
from made_tokenizers import byte_level, english

import zerofit.data
from zerofit.data.masking import WholeWordCollator, add_word_ids

_PADDING = {
    "sequence classification": (transformers.DataCollatorWithPadding, {"labels": 1}),
    "token classification": (transformers.DataCollatorForTokenClassification, {"labels": [1]}),
    "masked LM": (transformers.DataCollatorForLanguageModeling, {}),
    "whole words": (
        lambda tokenizer, **options: WholeWordCollator(tokenizer=tokenizer, **options),
        {"word_ids": [1]},
    ),
    "causal LM, sequence to sequence": (transformers.DataCollatorForSeq2Seq, {"labels": [1]}),
}
"""Collators, and the columns of their rows besides tokens; a list is one item for each token."""


@pytest.mark.parametrize("task", _PADDING)
@pytest.mark.parametrize(("multiple", "expected"), [(None, 11), (8, 16)])
def test_rows_are_padded_to_the_longest_of_the_batch(task: str, multiple: int | None, expected: int) -> None:
    make, columns = _PADDING[task]
    rows = [
        {
            "input_ids": [7] * length,
            "attention_mask": [1] * length,
            **{name: value * length if isinstance(value, list) else value for name, value in columns.items()},
        }
        for length in (3, 5, 11)
    ]
    batch = make(english(), pad_to_multiple_of=multiple)(rows)
    assert batch["input_ids"].shape == (3, expected)
    assert batch["attention_mask"].sum(1).tolist() == [3, 5, 11]
    if task != "sequence classification":
        assert batch["labels"].shape == (3, expected)
        assert batch["labels"][0, 3:].unique().tolist() == [-100]


def test_choices_of_a_sample_stay_together() -> None:
    rows = [{"input_ids": [[2, 9, 3], [2, 3]], "attention_mask": [[1, 1, 1], [1, 1]], "label": 1}] * 2
    batch = transformers.DataCollatorForMultipleChoice(english(), pad_to_multiple_of=8)(rows)
    assert batch["input_ids"].shape == (2, 2, 8)
    assert batch["labels"].tolist() == [1, 1]


def test_answers_in_a_text_are_positions() -> None:
    rows = [
        {"input_ids": [2, 9, 3], "start_positions": 1, "end_positions": 2},
        {"input_ids": [2], "start_positions": 0, "end_positions": 0},
    ]
    batch = transformers.DataCollatorWithPadding(english())(rows)
    assert batch["start_positions"].tolist() == [1, 0]
    assert batch["input_ids"].shape == (2, 3)


def _rows_to_mask() -> list[dict]:
    done = add_word_ids({"text": ["the bank of york ; the walk"] * 8}, english())
    return [{name: done[name][row] for name in done} for row in range(8)]


def test_masks_of_a_seed_are_the_same() -> None:
    first, same, other = (
        WholeWordCollator(tokenizer=english(), seed=seed)(_rows_to_mask())["labels"] for seed in (2, 2, 3)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not (first[:, [0, -1]] != -100).any()


def _two_epochs(collator: Any) -> list[torch.Tensor]:
    """Return the labels of two epochs, made by one worker that starts anew."""
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(_rows_to_mask(), batch_size=8, num_workers=1, collate_fn=collator)
    return [next(iter(loader))["labels"] for _ in range(2)]


def _masking(**options: Any) -> Any:
    """Return transformers' collator for rows with a column more."""
    masks = transformers.DataCollatorForLanguageModeling(english(), **options)
    return lambda rows: masks([{key: row[key] for key in row if key != "word_ids"} for row in rows])


@pytest.mark.parametrize("own", [True, False], ids=["whole words, seeded", "transformers' without seed"])
def test_workers_mask_other_tokens_in_each_epoch_and_the_same_in_each_run(own: bool) -> None:
    collator = WholeWordCollator(tokenizer=english(), seed=2) if own else _masking()
    again = pickle.loads(pickle.dumps(collator)) if own else _masking()
    first, second = _two_epochs(collator)
    assert not torch.equal(first, second)
    assert torch.equal(_two_epochs(again)[1], second)


def test_workers_of_transformers_own_mask_the_same_tokens_in_each_epoch_with_a_seed() -> None:
    first, second = _two_epochs(_masking(seed=2))
    assert torch.equal(first, second)


def test_a_causal_model_learns_to_end_though_the_end_also_pads() -> None:
    end = byte_level().eos_token_id
    rows = [{"input_ids": [5, 6, end]}, {"input_ids": [7, end]}]
    labelled = [{**row, "labels": row["input_ids"]} for row in rows]
    batch = transformers.DataCollatorForSeq2Seq(byte_level())(labelled)
    assert batch["labels"].tolist() == [[5, 6, end], [7, end, -100]]
    assert batch["input_ids"].tolist() == [[5, 6, end], [7, end, end]]
    theirs = transformers.DataCollatorForLanguageModeling(byte_level(), mlm=False)
    assert theirs(rows)["labels"].tolist() == [[5, 6, -100], [7, -100, -100]]


def test_labels_that_leave_the_prompt_out_are_kept() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [-100]}]
    batch = transformers.DataCollatorForSeq2Seq(byte_level())(rows)
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, -100, -100]]
    theirs = transformers.DataCollatorForLanguageModeling(byte_level(), mlm=False)
    assert theirs([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}])["labels"].tolist() == [[5, 6, 7]]


def test_a_seq2seq_models_decoder_gets_its_inputs() -> None:
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=100)
    config.decoder_start_token_id = 0
    model = transformers.T5ForConditionalGeneration(config)
    rows = [{"input_ids": [5, 6], "labels": [7, 8, 9]}, {"input_ids": [5], "labels": [7]}]
    batch = transformers.DataCollatorForSeq2Seq(english(), model=model)(rows)
    assert batch["labels"].tolist() == [[7, 8, 9], [7, -100, -100]]
    assert batch["decoder_input_ids"].tolist() == [[0, 7, 8], [0, 7, 0]]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("collator_for", "the collator of your task, which transformers or zerofit.data has"),
        ("pack_documents", "transformers' DataCollatorWithFlattening, or SFTConfig(packing=True) of TRL"),
        ("PackedRows", "transformers' DataCollatorWithFlattening, or SFTConfig(packing=True) of TRL"),
        (
            "keep_documents_apart",
            "transformers' DataCollatorWithFlattening, or SFTConfig(packing=True) of TRL",
        ),
    ],
)
def test_a_removed_name_tells_what_to_use(name: str, instead: str) -> None:
    with pytest.raises(ImportError) as caught:
        getattr(zerofit.data, name)
    assert str(caught.value) == f"zerofit.data.{name} was removed: use {instead}: docs/collators.md"
