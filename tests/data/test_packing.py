"""Packed documents: full rows, labels that end with each document, and the loss that each has alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import byte_level
from transformers import AutoConfig, AutoModelForCausalLM

from zerofit.core.errors import UserError
from zerofit.data.collators import FlatDocuments, collator_for
from zerofit.data.packing import APART, MIXED, PackedRows, keep_documents_apart, pack_documents, pack_lengths

pytestmark = pytest.mark.filterwarnings("ignore:the model's cache is off")

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
_GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 64}
_OTHER_SIZES = {
    "bert": {"is_decoder": True},
    "bloom": {"n_layer": 2, "n_head": 4},
    "codegen": {**_GPT2_SIZES, "rotary_dim": 4},
    "ctrl": {**_GPT2_SIZES, "dff": 64},
    "falcon": {"alibi": False},
    "gemma": {"head_dim": 8},
    "gpt2": _GPT2_SIZES,
    "gpt_bigcode": _GPT2_SIZES,
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
    },
    "gptj": {**_GPT2_SIZES, "rotary_dim": 4},
    "mixtral": {"num_local_experts": 2},
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
}
_XLNET_SIZES = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "vocab_size": 64}
_EAGER_ONLY = {"bloom", "codegen", "gpt_neo", "gptj", "mamba", "mpt", "xlnet"}


def _model(family: str, attention: str = "eager") -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = _XLNET_SIZES if family == "xlnet" else {**_SIZES, **_OTHER_SIZES.get(family, {})}
    config = AutoConfig.for_model(family, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def _documents(*lengths: int) -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(3, 64, (length,)).tolist() for length in lengths]


def _losses(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Return the loss of each token of a batch, 0 where it has no label."""
    with torch.no_grad():
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    flat = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="none"
    )
    return flat.view(len(logits), -1)


def _alone(model: torch.nn.Module, documents: list[list[int]]) -> list[float]:
    """Return the loss of each token that has one, of one document after the other, each alone."""
    rows = [torch.tensor([ids]) for ids in documents]
    return [loss for row in rows for loss in _losses(model, {"input_ids": row, "labels": row})[0].tolist()]


def test_rows_worked_by_hand() -> None:
    assert pack_lengths([3, 9, 2, 5, 4, 7], 10) == [[1], [5, 0], [3, 4], [2]]
    packed = pack_documents(
        {"input_ids": [[11, 12], [21, 22, 23, 24, 25], [31, 32]]}, row_length=8, pad_token_id=9
    )
    assert packed == {
        "input_ids": [[21, 22, 23, 24, 25, 11, 12, 9], [31, 32, 9, 9, 9, 9, 9, 9]],
        "position_ids": [[0, 1, 2, 3, 4, 0, 1, 0], [0, 1, 0, 1, 2, 3, 4, 5]],
        "labels": [[-100, 22, 23, 24, 25, -100, 12, -100], [-100, 32, *[-100] * 6]],
    }


def test_a_document_longer_than_a_row_becomes_several_and_labels_of_its_own_stay() -> None:
    packed = pack_documents(
        {"input_ids": [[1, 2, 3, 4, 5]], "labels": [[-100, -100, 3, 4, 5]]}, row_length=3, pad_token_id=0
    )
    assert packed["input_ids"] == [[1, 2, 3], [4, 5, 0]]
    assert packed["labels"] == [[-100, -100, 3], [-100, 5, -100]]


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
    model = _model(family, attention)
    documents = _documents(9, 7, 12, 3, 16, 5)
    collate = collator_for("packed-causal-lm", byte_level(), model=model)
    packed = pack_documents({"input_ids": documents}, row_length=20, pad_token_id=0)
    batch = collate([{name: packed[name][row] for name in packed} for row in range(len(packed["labels"]))])
    assert set(batch) == {"input_ids", "position_ids", "labels"}
    losses = _losses(model, batch)
    assert losses[losses != 0].sort().values.tolist() == pytest.approx(
        sorted(_alone(model, documents)), abs=1e-5
    )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_documents_in_one_row_without_padding_have_the_losses_that_they_have_alone(family: str) -> None:
    model = _model(family, "sdpa")
    documents = _documents(9, 7, 12)
    collate = collator_for("flat-causal-lm", byte_level(), model=model)
    assert isinstance(collate, FlatDocuments)
    losses = _losses(model, dict(collate([{"input_ids": ids} for ids in documents])))
    assert losses[losses != 0].tolist() == pytest.approx(_alone(model, documents), abs=1e-5)


def test_with_a_cache_documents_see_each_other_so_it_is_switched_off() -> None:
    model = _model("llama", "sdpa")
    first, second = _documents(9, 7)
    ids, positions = torch.tensor([first + second]), torch.tensor([[*range(9), *range(7)]])
    alone = model(input_ids=torch.tensor([second])).logits[0]
    assert (model(input_ids=ids, position_ids=positions).logits[0, 9:] - alone).abs().max() > 1e-2
    assert keep_documents_apart(model) == (
        "the model's cache is switched off: with it, packed documents attend to each other",
    )
    assert (model(input_ids=ids, position_ids=positions).logits[0, 9:] - alone).abs().max() < 1e-5
    assert keep_documents_apart(model) == ()


@pytest.mark.parametrize("family", sorted(APART | MIXED))
def test_what_is_said_of_a_family_is_so(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerofit.data.packing.APART", frozenset())
    monkeypatch.setattr("zerofit.data.packing.MIXED", frozenset())
    for attention in ("eager",) if family in _EAGER_ONLY else ("eager", "sdpa"):
        model = _model(family, attention)
        if family in APART:
            keep_documents_apart(model)
            first, second = _documents(9, 7)
            ids, positions = torch.tensor([first + second]), torch.tensor([[*range(9), *range(7)]])
            with torch.no_grad():
                packed = model(input_ids=ids, position_ids=positions).logits[0, 9:]
                alone = model(input_ids=ids[:, 9:]).logits[0]
            torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
        else:
            with pytest.raises(UserError, match="packed documents attend to each other"):
                keep_documents_apart(model)


def test_a_family_that_mixes_is_refused_before_any_batch() -> None:
    with pytest.raises(UserError) as caught:
        collator_for("packed-causal-lm", byte_level(), model=_model("opt"))
    assert str(caught.value).startswith(
        "error[packing-mixes-documents]: packed documents attend to each other in OPTForCausalLM\n"
        "  found: opt with eager attention, measured for its family\n"
    )


def test_an_unknown_family_without_weights_is_told_of() -> None:
    with torch.device("meta"):
        model = _model("gpt_neox_japanese")
    assert keep_documents_apart(model)[-1] == (
        "packing with gpt_neox_japanese is untested: its weights are not available for a test"
    )


def test_flash_attention_gets_one_flat_row() -> None:
    rows = [{"input_ids": [1, 2, 3], "position_ids": [0, 0, 1], "labels": [-100, -100, 3]}] * 2
    batch = PackedRows(flat=True)(rows)
    assert batch["position_ids"].tolist() == [[0, 0, 1, 0, 0, 1]]
    assert {value.shape for value in batch.values()} == {(1, 6)}


def test_documents_that_are_padded_lose_their_padding() -> None:
    examples = {
        "input_ids": [[11, 12, 13, 0, 0, 0], [0, 0, 21, 22, 23, 24]],
        "attention_mask": [[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]],
    }
    packed = pack_documents(examples, row_length=8, pad_token_id=9)
    assert packed["input_ids"] == [[21, 22, 23, 24, 11, 12, 13, 9]]
    assert packed["labels"] == [[-100, 22, 23, 24, -100, 12, 13, -100]]
    with_labels = pack_documents(
        {**examples, "labels": [[-100, 12, 13, 7, 7, 7], [7, 7, 21, -100, 23, 24]]},
        row_length=8,
        pad_token_id=9,
    )
    assert with_labels["labels"] == [[-100, -100, 23, 24, -100, 12, 13, -100]]


def test_documents_in_one_row_lose_their_padding() -> None:
    collate = collator_for("flat-causal-lm", byte_level(), model=_model("gpt2"))
    row = {"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]}
    batch = collate([row, {"input_ids": [7, 8, 9]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[-100, 6, -100, 8, 9]]


def test_rows_need_a_token_to_fill_them() -> None:
    with pytest.raises(UserError) as caught:
        pack_documents({"input_ids": [[1, 2, 3]]}, row_length=8, pad_token_id=None)
    assert caught.value.rule == "padding-token-missing"
