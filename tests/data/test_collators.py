"""Each task has its collator, transformers' own where there is one; what does not fit is refused."""

from __future__ import annotations

import pickle

import pytest
import torch
import transformers
from made_tokenizers import byte_level, english

from zerofit.core.errors import UserError
from zerofit.data.collators import CausalCollator, collator_for
from zerofit.data.masking import WholeWordCollator, add_word_ids

_TASKS = {
    "sequence-classification": lambda length: {"labels": 1},
    "token-classification": lambda length: {"labels": [1] * length},
    "seq2seq": lambda length: {"labels": [1] * length},
    "masked-lm": lambda length: {},
    "whole-word-masked-lm": lambda length: {"word_ids": list(range(length))},
    "causal-lm": lambda length: {},
}
"""Columns of rows besides their tokens."""


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("sequence-classification", transformers.DataCollatorWithPadding),
        ("token-classification", transformers.DataCollatorForTokenClassification),
        ("multiple-choice", transformers.DataCollatorForMultipleChoice),
        ("masked-lm", transformers.DataCollatorForLanguageModeling),
        ("whole-word-masked-lm", WholeWordCollator),
        ("causal-lm", CausalCollator),
        ("seq2seq", transformers.DataCollatorForSeq2Seq),
    ],
)
def test_a_task_has_its_collator(task: str, expected: type) -> None:
    assert type(collator_for(task, english())) is expected


@pytest.mark.parametrize("task", _TASKS)
@pytest.mark.parametrize(("multiple", "expected"), [(None, 11), (8, 16)])
def test_rows_are_padded_to_the_longest_of_the_batch(task: str, multiple: int | None, expected: int) -> None:
    rows = [
        {"input_ids": [7] * length, "attention_mask": [1] * length, **_TASKS[task](length)}
        for length in (3, 5, 11)
    ]
    batch = collator_for(task, english(), pad_to_multiple_of=multiple)(rows)
    assert batch["input_ids"].shape == (3, expected)
    assert batch["attention_mask"].sum(1).tolist() == [3, 5, 11]
    if task != "sequence-classification":
        assert batch["labels"].shape == (3, expected)
        assert batch["labels"][0, 3:].unique().tolist() == [-100]


def test_choices_of_a_sample_stay_together() -> None:
    rows = [{"input_ids": [[2, 9, 3], [2, 3]], "attention_mask": [[1, 1, 1], [1, 1]], "label": 1}] * 2
    batch = collator_for("multiple-choice", english(), pad_to_multiple_of=8)(rows)
    assert batch["input_ids"].shape == (2, 2, 8)
    assert batch["labels"].tolist() == [1, 1]


_MASKING = ("masked-lm", "whole-word-masked-lm")


def _rows_to_mask() -> list[dict]:
    done = add_word_ids({"text": ["the bank of york ; the walk"] * 8}, english())
    return [{name: done[name][row] for name in done} for row in range(8)]


@pytest.mark.parametrize("task", _MASKING)
def test_masks_of_a_seed_are_the_same(task: str) -> None:
    first, same, other = (
        collator_for(task, english(), seed=seed)(_rows_to_mask())["labels"] for seed in (2, 2, 3)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not (first[:, [0, -1]] != -100).any()


def _two_epochs(collator: object) -> list[torch.Tensor]:
    """Return the labels of two epochs, made by one worker that starts anew."""
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(_rows_to_mask(), batch_size=8, num_workers=1, collate_fn=collator)
    return [next(iter(loader))["labels"] for _ in range(2)]


@pytest.mark.parametrize("task", _MASKING)
def test_workers_mask_other_tokens_in_each_epoch_and_the_same_in_each_run(task: str) -> None:
    first, second = _two_epochs(collator_for(task, english(), seed=2))
    assert not torch.equal(first, second)
    again = pickle.loads(pickle.dumps(collator_for(task, english(), seed=2)))
    assert torch.equal(_two_epochs(again)[1], second)


def test_workers_of_transformers_own_mask_the_same_tokens_in_each_epoch() -> None:
    rows = transformers.DataCollatorForLanguageModeling(english(), seed=2)
    first, second = _two_epochs(
        lambda batch: rows([{key: row[key] for key in row if key != "word_ids"} for row in batch])
    )
    assert torch.equal(first, second)


def test_a_causal_model_learns_to_end_though_the_end_also_pads() -> None:
    end = byte_level().eos_token_id
    rows = [{"input_ids": [5, 6, end]}, {"input_ids": [7, end]}]
    batch = collator_for("causal-lm", byte_level())(rows)
    assert batch["labels"].tolist() == [[5, 6, end], [7, end, -100]]
    assert batch["input_ids"].tolist() == [[5, 6, end], [7, end, end]]
    theirs = transformers.DataCollatorForLanguageModeling(byte_level(), mlm=False)
    assert theirs(rows)["labels"].tolist() == [[5, 6, -100], [7, -100, -100]]


def test_labels_that_leave_the_prompt_out_are_kept() -> None:
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [-100]}]
    batch = collator_for("causal-lm", byte_level())(rows)
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, -100, -100]]


def test_a_seq2seq_models_decoder_gets_its_inputs() -> None:
    config = transformers.T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=100)
    config.decoder_start_token_id = 0
    model = transformers.T5ForConditionalGeneration(config)
    rows = [{"input_ids": [5, 6], "labels": [7, 8, 9]}, {"input_ids": [5], "labels": [7]}]
    batch = collator_for("seq2seq", english(), model=model)(rows)
    assert batch["labels"].tolist() == [[7, 8, 9], [7, -100, -100]]
    assert batch["decoder_input_ids"].tolist() == [[0, 7, 8], [0, 7, 0]]


@pytest.mark.parametrize(
    ("task", "tokenizer", "expected"),
    [
        (
            "causal-ml",
            english,
            "error[unknown-task]: there is no collator for causal-ml\n"
            "  found: task='causal-ml'\n"
            "  why:   each task has its own collator, which makes the labels\n"
            "  fix:   take causal-lm",
        ),
        ("packed-causal-lm", english, "error[packing-needs-model]: documents share rows"),
        ("flat-causal-lm", english, "error[packing-needs-model]: documents share rows"),
    ],
)
def test_what_does_not_fit_is_refused(task: str, tokenizer, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        collator_for(task, tokenizer())
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize("as_tensors", [False, True])
def test_rows_that_are_padded_already_are_not_trained_on_their_padding(as_tensors: bool) -> None:
    rows = [
        {"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]},
        {"input_ids": [0, 7, 8, 9], "attention_mask": [0, 1, 1, 1]},
    ]
    if as_tensors:
        rows = [{name: torch.tensor(value) for name, value in row.items()} for row in rows]
    batch = collator_for("causal-lm", byte_level())(rows)
    assert batch["labels"].tolist() == [[5, 6, -100, -100], [-100, 7, 8, 9]]
