"""zerofit data with tokenizers of transformers: in the hub's cache, slow ones, and the same counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click import Command
from made_datasets import make_tokenizer, rows

from zerofit.cli.data import data
from zerofit.data.tokenizer_files import load_tokenizer

_TEXTS = ["one two", "", "drei Wörter hier"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a dataset and an empty cache of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "a.txt").write_text("\n".join(_TEXTS), encoding="utf-8")
    return tmp_path


def _document(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, object], str]:
    command: Command = data
    command.main([*words, "--json"], prog_name="zerofit data", standalone_mode=False)
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_a_slow_tokenizer_counts_the_same_and_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer()
    slow.save_pretrained(folder / "slow")
    document, _ = _document(capsys, "a.txt", "--tokenizer", "slow")
    expected = sorted(len(slow(text)["input_ids"]) for text in _TEXTS)
    assert document["histogram"] == [[length, 1] for length in expected]
    assert document["notes"] == [
        "slow runs in Python, in one process: dataset.map(..., num_proc=8) tokenizes in several, and its "
        "ids can then be counted",
        "1 sample of empty text",
    ]


def test_a_tokenizer_json_counts_what_transformers_makes_of_it(folder: Path) -> None:
    from transformers import AutoTokenizer

    make_tokenizer(folder / "tok", model_max_length=512)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_max_length": 512}
    (folder / "tok" / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(folder / "tok")
    texts = [row["text"] or "" for row in rows()]
    loaded = load_tokenizer("tok")
    assert loaded([(text,) for text in texts]) == [
        len(ids) for ids in theirs(texts, truncation=False, padding=False)["input_ids"]
    ]
    assert (loaded.is_fast, loaded.model_max_length) == (True, 512)


def test_a_hub_id_is_found_in_the_cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = folder / "hub" / "models--someone--model"
    snapshot = model / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    make_tokenizer(snapshot, model_max_length=128)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    document, said = _document(capsys, "a.txt", "--tokenizer", "someone/model")
    assert (document["histogram"], document["model_max_length"]) == ([[2, 1], [4, 1], [5, 1]], 128)
    assert said == ""
