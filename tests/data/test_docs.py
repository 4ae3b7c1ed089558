"""The examples of docs/data.md and docs/collators.md, run one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from made_tokenizers import byte_level, chinese, english
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from zerofit.data.packing import APART, MIXED

_DOCS = Path(__file__).parents[2] / "docs"
_PAGES = "".join((_DOCS / name).read_text("utf-8") for name in ("data.md", "collators.md"))
_NAMES = ("O", "B-ORG", "I-ORG")


@pytest.fixture
def theirs(tmp_path: Path) -> dict[str, Any]:
    """Return the objects that the pages call your own."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    words = datasets.List(datasets.Value("string"))
    tags = datasets.List(datasets.ClassLabel(names=list(_NAMES)))
    texts = ["the bank of york", "banking", "the banker walks to the bank"] * 40
    vocabulary = english().get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)))
    return {
        "tokenizer": chinese(),
        "slow_tokenizer": BertTokenizerLegacy(str(tmp_path / "vocab.txt")),
        "causal_tokenizer": byte_level(),
        "model": BertForSequenceClassification(BertConfig(vocab_size=128, **sizes)),
        "causal_model": GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)),
        "texts": texts,
        "train_rows": [{**chinese()(text), "labels": len(text) % 2} for text in texts],
        "english": datasets.Dataset.from_dict({"text": texts}),
        "chinese": datasets.Dataset.from_dict({"text": ["今天我在北京大学"]}),
        "segment": lambda text: re.findall("今天|我|在|北京|大学", text),
        "documents": datasets.Dataset.from_dict({"input_ids": byte_level()(texts)["input_ids"]}),
        "tagged": datasets.Dataset.from_dict(
            {"tokens": [["the", "bank", "of", "york"]], "ner_tags": [[0, 1, 2, 2]]},
            features=datasets.Features({"tokens": words, "ner_tags": tags}),
        ),
    }


def test_the_pages_name_the_families_that_can_be_packed_and_those_that_cannot() -> None:
    text = " ".join(_PAGES.split()).replace("bert (as a decoder)", "bert")
    for families in (APART, MIXED):
        assert ", ".join(sorted(families)) in text


@pytest.mark.filterwarnings("ignore:the model's cache is off")
def test_the_examples_of_the_pages_run(
    theirs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = []
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", _PAGES, re.DOTALL)):
        exec(compile(block, f"block {number}", "exec"), theirs)
        if "rows = " in block:
            made.append(theirs["rows"])
    tagged, whole_words, chinese_words = made
    assert tagged[0]["labels"] == [-100, 0, 1, 2, 2, -100]
    assert whole_words[2]["word_ids"] == [-1, 0, 1, 1, 2, 2, 3, 4, 5, -1]
    assert chinese_words[0]["word_ids"] == [-1, 0, 0, 1, 2, 3, 3, 4, 4, -1]
    assert len(theirs["results"]) == len(theirs["train_rows"])
    assert {len(row["input_ids"]) for row in theirs["packed"]} == {512}
    assert next(iter(theirs["loader"]))["input_ids"].shape[0] == 32
