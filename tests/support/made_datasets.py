"""A small dataset in every kind of file that `zerofit data` reads, and a tokenizer whose tokens are words."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

NUM_WORDS = (3, 0, 1, 5, 5, 12, 2)
"""Of each row's text; the second row has none."""
LENGTHS = sorted(number + 2 for number in NUM_WORDS)
"""In tokens: a special one stands before and behind."""


def rows() -> list[dict[str, Any]]:
    """Return the dataset; a text has line ends and separators in it, and one is missing."""
    texts = [" ".join(["wörd,\n\t"] * number) if number else None for number in NUM_WORDS]
    return [{"id": number, "text": text, "label": number % 2} for number, text in enumerate(texts)]


def make_tokenizer(folder: Path, *, model_max_length: int | None = None) -> None:
    """Write a tokenizer.json that makes a token of each word, and one before and one behind."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.enable_truncation(4)  # what a script once set, which is not to cut what is counted
    tokenizer.enable_padding(length=64)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if model_max_length is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": model_max_length}))


def make_files(folder: Path) -> None:
    """Write the dataset as text of every kind."""
    lines = [json.dumps(row) + "\n" for row in rows()]
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "bom.jsonl").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    (folder / "list.json").write_text(json.dumps(rows()))
    (folder / "pretty.json").write_text(json.dumps(rows(), indent=2, ensure_ascii=False), encoding="utf-8")
    (folder / "lines.json").write_text("".join(lines))
    with gzip.open(folder / "packed.jsonl.gz", "wt") as file:
        file.writelines(lines)
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerow(rows()[0])
            writer.writerows(row.values() for row in rows())
    # A line is a sample here, so that line ends within texts go.
    texts = [(row["text"] or "").replace("\n", "") for row in rows()]
    (folder / "a.txt").write_text("\n".join(texts), encoding="utf-8")
    make_arrow_files(folder)


def make_arrow_files(folder: Path) -> None:
    """Write the dataset as parquet and as Arrow's file format."""
    import pyarrow.ipc
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows())
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=3)
    with pyarrow.ipc.new_file(folder / "file.arrow", table.schema) as writer:
        writer.write_table(table)


def make_saved(folder: Path) -> None:
    """Write the dataset as datasets' save_to_disk does: one, one in shuffled order, splits, and ids."""
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_list(rows())
    table.save_to_disk(folder / "saved")
    table.select([5, 0, 5]).save_to_disk(folder / "selected")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(folder / "splits")
    ids = [{"input_ids": [1] * length} for length in LENGTHS]
    datasets.Dataset.from_list(ids).save_to_disk(folder / "ids")
    masks = [{**row, "attention_mask": [1] * 2 + [0] * (len(row["input_ids"]) - 2)} for row in ids]
    datasets.Dataset.from_list(masks).to_parquet(folder / "masked.parquet")
    (folder / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in masks))
