"""The examples of docs/data.md and docs/collators.md, run one after the other."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from made_tokenizers import byte_level, chinese, english
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

_DOCS = Path(__file__).parents[2] / "docs"
_PAGES = "".join((_DOCS / name).read_text("utf-8") for name in ("data.md", "collators.md"))
_BLOCKS = re.findall(r"```python\n(.*?)```", _PAGES, re.DOTALL)
_NAMES = ("O", "B-ORG", "I-ORG")
_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
_T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
_SOUND = {"conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
_WHISPER = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
}
_WHISPER |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "num_mel_bins": 80}


@pytest.fixture
def theirs(tmp_path: Path) -> dict[str, Any]:
    """Return the objects that the pages call your own."""
    words = datasets.List(datasets.Value("string"))
    tags = datasets.List(datasets.ClassLabel(names=list(_NAMES)))
    texts = ["the bank of york", "banking", "the banker walks to the bank"] * 40
    vocabulary = english().get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)))
    return {
        "torch": torch,
        "tokenizer": chinese(),
        "slow_tokenizer": BertTokenizerLegacy(str(tmp_path / "vocab.txt")),
        "causal_tokenizer": byte_level(),
        "model": BertForSequenceClassification(BertConfig(vocab_size=128, **_SMALL)),
        "causal_model": GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)),
        "seq2seq_model": T5ForConditionalGeneration(T5Config(vocab_size=128, **_T5)),
        "feature_extractor": Wav2Vec2FeatureExtractor(),
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


@pytest.mark.filterwarnings("ignore:the model's cache is off")
def test_the_examples_of_the_pages_run(
    theirs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in theirs["texts"]))
    theirs["tokenizer"].save_pretrained("model")
    made = []
    for number, block in enumerate(_BLOCKS):
        if "from trl" in block:  # below
            continue
        exec(compile(block, f"block {number}", "exec"), theirs)
        if "rows = " in block:
            made.append(theirs["rows"])
    tagged, whole_words, chinese_words = made
    assert tagged[0]["labels"] == [-100, 0, 1, 2, 2, -100]
    assert whole_words[2]["word_ids"] == [-1, 0, 1, 1, 2, 2, 3, 4, 5, -1]
    assert chinese_words[0]["word_ids"] == [-1, 0, 0, 1, 2, 3, 3, 4, 4, -1]
    assert len(theirs["results"]) == len(theirs["train_rows"])
    lengths = [len(one["input_ids"]) for one in theirs["documents"].select(range(8))]
    assert next(iter(theirs["loader"]))["input_ids"].shape == (1, sum(lengths))


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_the_example_of_trl_runs(
    theirs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = (block for block in _BLOCKS if "from trl" in block)
    exec(block.replace('report_to="none"', 'report_to="none", use_cpu=True, bf16=False'), theirs)
    trainer = theirs["trainer"]
    batch = next(iter(trainer.get_train_dataloader()))
    assert "attention_mask" not in batch
    assert int((batch["position_ids"] == 0).sum()) > len(batch["input_ids"])
    assert trainer.model.config.use_cache is False


def _tokens(tokenizer: Any, *texts: str, **columns: Any) -> list[dict[str, Any]]:
    return [{**tokenizer(text), **columns} for text in texts]


def _with_labels(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "labels": row["input_ids"]} for row in rows]


_BERT = {"vocab_size": 128, **_SMALL}
_TASKS: dict[str, tuple[Any, Any]] = {
    "sequence classification": (
        lambda: BertForSequenceClassification(BertConfig(**_BERT)),
        lambda: _tokens(chinese(), "the bank", "banking of york", labels=1),
    ),
    "token classification": (
        lambda: BertForTokenClassification(BertConfig(**_BERT)),
        lambda: [
            {**row, "labels": [1] * len(row["input_ids"])} for row in _tokens(chinese(), "the", "the bank")
        ],
    ),
    "multiple choice": (
        lambda: BertForMultipleChoice(BertConfig(**_BERT)),
        lambda: [
            {**chinese()(["the bank", "york"]), "label": 1},
            {**chinese()(["a", "the bank of"]), "label": 0},
        ],
    ),
    "causal LM": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)),
        lambda: _with_labels(_tokens(byte_level(), "the bank", "walking of york")),
    ),
    "masked LM": (
        lambda: BertForMaskedLM(BertConfig(**_BERT)),
        lambda: _tokens(chinese(), *["the bank of york walks"] * 8),
    ),
    "sequence to sequence": (
        lambda: T5ForConditionalGeneration(T5Config(vocab_size=128, **_T5)),
        lambda: _with_labels(_tokens(chinese(), "the bank", "banking of york")),
    ),
    "image classification": (
        lambda: ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **_SMALL)),
        lambda: [{"pixel_values": torch.rand(3, 8, 8), "labels": 1}] * 2,
    ),
}


@pytest.mark.parametrize("task", _TASKS)
def test_each_tasks_collator_makes_a_batch_that_its_model_trains_on(
    task: str, theirs: dict[str, Any]
) -> None:
    (block,) = (block for block in _BLOCKS if "by_task" in block)
    exec(block, theirs)
    assert set(theirs["by_task"]) == set(_TASKS)
    make_model, make_rows = _TASKS[task]
    batch = theirs["by_task"][task](make_rows())
    loss = make_model()(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)


def test_speech_is_collated_for_ctc_and_for_whisper(theirs: dict[str, Any], tmp_path: Path) -> None:
    (block,) = (block for block in _BLOCKS if "collate_speech" in block)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abc"]
    (tmp_path / "vocab.json").write_text(json.dumps({letter: place for place, letter in enumerate(letters)}))
    theirs["tokenizer"] = Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json"))
    exec(block, theirs)
    texts = [theirs["tokenizer"](text)["input_ids"] for text in ("ab", "cab a")]
    sounds = [torch.rand(length).numpy() for length in (4000, 5000)]
    rows = [
        {
            "input_values": theirs["feature_extractor"](sound, sampling_rate=16000).input_values[0],
            "labels": text,
        }
        for sound, text in zip(sounds, texts, strict=True)
    ]
    batch = theirs["collate_speech"](rows)
    assert batch["labels"].tolist() == [[5, 6, -100, -100, -100], texts[1]]
    ctc = Wav2Vec2ForCTC(Wav2Vec2Config(vocab_size=len(letters), pad_token_id=0, **_SMALL, **_SOUND))
    assert torch.isfinite(ctc(**batch).loss)
    extractor = theirs["feature_extractor"] = WhisperFeatureExtractor()
    rows = [
        {"input_features": extractor(sound, sampling_rate=16000).input_features[0], "labels": text}
        for sound, text in zip(sounds, texts, strict=True)
    ]
    batch = theirs["collate_speech"](rows, inputs="input_features")
    whisper = WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            **_WHISPER,
        )
    )
    assert torch.isfinite(whisper(**batch).loss)
