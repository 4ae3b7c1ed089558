"""Packed documents: how they fill rows, and that each has the loss which it has alone, as the page says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from zerofit.data import pack_lengths

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "vocab_size": 64,
    "pad_token_id": 0,
}
_OTHER_SIZES = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
}


def _model(family: str, attention: str = "eager", *, use_cache: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = _SIZES if family != "xlnet" else {"vocab_size": 64}
    config = AutoConfig.for_model(family, **{**sizes, **_OTHER_SIZES.get(family, {})})
    config.use_cache = use_cache
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def _documents(*lengths: int) -> list[dict[str, list[int]]]:
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(3, 64, (length,)).tolist()} for length in lengths]


def _losses(model: Any, batch: dict[str, Any]) -> list[float]:
    """Return the loss of each token of a batch that has a label."""
    with torch.no_grad():
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    labels = batch["labels"][:, 1:].flatten()
    flat = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="none")
    return flat[labels != -100].tolist()


def _alone(model: Any, documents: list[dict[str, list[int]]]) -> list[float]:
    rows = [torch.tensor([one["input_ids"]]) for one in documents]
    return [loss for row in rows for loss in _losses(model, {"input_ids": row, "labels": row})]


def test_rows_worked_by_hand() -> None:
    assert pack_lengths([3, 9, 2, 5, 4, 7], 10) == [[1], [5, 0], [3, 4], [2]]


@given(st.lists(st.integers(1, 64)), st.just(64))
def test_every_document_is_in_one_row_and_no_row_is_too_long(lengths: list[int], row_length: int) -> None:
    rows = pack_lengths(lengths, row_length)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert all(tokens <= row_length for tokens in filled)
    # Two rows that would fit into one were never opened beside each other.
    assert len(filled) < 2 or sum(sorted(filled)[:2]) > row_length


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_each_documents_losses_are_those_that_it_has_alone(family: str, attention: str) -> None:
    model, documents = _model(family, attention), _documents(9, 7, 12)
    batch = DataCollatorWithFlattening()(documents)
    assert set(batch) == {"input_ids", "position_ids", "labels"}
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(1, 28)}
    assert _losses(model, batch) == pytest.approx(_alone(model, documents), abs=1e-5)


@pytest.mark.parametrize(
    ("family", "attention", "use_cache"),
    [
        ("llama", "sdpa", True),
        *((family, "eager", False) for family in ("bloom", "mpt", "opt", "xlnet", "falcon")),
    ],
)
def test_with_a_cache_and_in_some_families_documents_attend_to_each_other(
    family: str, attention: str, use_cache: bool
) -> None:
    model, documents = _model(family, attention, use_cache=use_cache), _documents(9, 7)
    found, expected = _losses(model, DataCollatorWithFlattening()(documents)), _alone(model, documents)
    assert found[8:] != pytest.approx(expected[8:], abs=5e-5)  # apart, they agree to 1e-5


def test_a_trainer_switches_the_cache_off(tmp_path: Any) -> None:
    model = _model("llama", "sdpa", use_cache=True)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        max_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    data = _documents(9, 7, 12, 5)
    Trainer(
        model=model, args=arguments, train_dataset=data, data_collator=DataCollatorWithFlattening()
    ).train()
    assert model.config.use_cache is False


def test_boundaries_for_flash_attention_and_for_layers_without_attention() -> None:
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(_documents(3, 2))
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert (batch["max_length_q"], batch["seq_idx"].tolist()) == (3, [[0, 0, 0, 1, 1]])


@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        ("bfd", [[1, 2, 3, 4], [6, 7, 8, 9]]),
        ("bfd_split", [[1, 2, 3, 4], [6, 7, 8, 9], [5]]),
        ("wrapped", [[1, 2, 3, 4], [5, 6, 7, 8], [9]]),
    ],
)
def test_rows_of_trl(strategy: str, rows: list[list[int]]) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    documents = Dataset.from_dict({"input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9]]})
    packed = trl.pack_dataset(documents, seq_length=4, strategy=strategy)
    assert packed["input_ids"][:] == rows
    assert ("seq_lengths" in packed.column_names) == (strategy != "wrapped")


def test_trl_trains_each_document_as_if_it_were_alone() -> None:
    collators = pytest.importorskip("trl.trainer.sft_trainer")
    model, documents = _model("llama", "sdpa"), _documents(9, 7, 12)
    collate = collators.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    tokens = [token for one in documents for token in one["input_ids"]]
    batch = collate([{"input_ids": tokens, "seq_lengths": [9, 7, 12]}])
    assert "attention_mask" not in batch
    assert _losses(model, batch) == pytest.approx(_alone(model, documents), abs=1e-5)
