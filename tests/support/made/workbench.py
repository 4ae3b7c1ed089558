"""A folder in which scripts find made models, datasets and metrics under their names on the hub."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

from made.data import save_data
from made.models import KINDS, save_classifier, save_model
from made.pictures import save_picture_models, save_pictures, save_sounds

_GLUE_README = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: mrpc/train.csv
  - split: validation
    path: mrpc/validation.csv
---
"""

_METRIC = '''"""A made metric: it only counts."""

import datasets
import evaluate
import numpy


class {class_name}(evaluate.Metric):
    def _info(self):
        features = datasets.Features({features})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references, **options):
        equal = sum({equal} for one, other in zip(predictions, references, strict=True))
        return {result}
'''
_ONE_CLASS = '{"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}'
_TAGS = '{name: datasets.Sequence(datasets.Value("string")) for name in ("predictions", "references")}'
_TEXTS = '{name: datasets.Value("string") for name in ("predictions", "references")}'
_TEXT_AND_TEXTS = (
    '{"predictions": datasets.Value("string"), "references": datasets.Sequence(datasets.Value("string"))}'
)
_ANSWERS = (
    '{"predictions": {"id": datasets.Value("string"), "prediction_text": datasets.Value("string")},'
    ' "references": {"id": datasets.Value("string"), "answers": datasets.Sequence('
    '{"text": datasets.Value("string"), "answer_start": datasets.Value("int32")})}}'
)
_MASKS = (
    '{name: datasets.Sequence(datasets.Sequence(datasets.Value("uint16")))'
    ' for name in ("predictions", "references")}'
)
_RATIO = "equal / max(1, len(predictions))"
_METRICS = {
    "accuracy": (_ONE_CLASS, "one == other", f'{{"accuracy": {_RATIO}}}'),
    "glue": (_ONE_CLASS, "one == other", f'{{"accuracy": {_RATIO}}}'),
    "seqeval": (
        _TAGS,
        "one == other",
        "{f'overall_{name}': " + _RATIO + ' for name in ("precision", "recall", "f1", "accuracy")}',
    ),
    "rouge": (_TEXTS, "len(set(one.split()) & set(other.split()))", f'{{"rouge1": {_RATIO}}}'),
    "wer": (_TEXTS, "one == other", f'{{"wer": 1 - {_RATIO}}}'),
    "sacrebleu": (_TEXT_AND_TEXTS, "one in other", f'{{"score": {_RATIO}}}'),
    "mean_iou": (
        _MASKS,
        "one == other",
        '{"mean_iou": 0.0} | dict.fromkeys(("per_category_accuracy", "per_category_iou"), numpy.zeros(2))',
    ),
    "squad": (
        _ANSWERS,
        'one["prediction_text"] in other["answers"]["text"]',
        f'{{"exact_match": {_RATIO}, "f1": {_RATIO}}}',
    ),
}
"""The features, what is counted, and the result of each metric."""


def make_workbench(folder: Path, *, seed: int = 0) -> Path:
    """Write models/, data/ and the names of the hub into a folder, and return it.

    A script that runs in it and loads "bert-base-cased", "nyu-mll/glue" or the metric "accuracy" finds the
    folder of that name before it would ask the hub.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        save_model(kind, folder / "models" / kind, seed=seed)
    save_model("bert", folder / "models" / "bert-dropout", dropout=0.1, seed=seed)
    data = save_data(folder / "data", seed=seed)
    shutil.copytree(folder / "models" / "bert", folder / "bert-base-cased")
    mrpc = folder / "nyu-mll" / "glue" / "mrpc"
    mrpc.mkdir(parents=True)
    (mrpc.parent / "README.md").write_text(_GLUE_README, encoding="utf-8")
    for split in ("train", "validation"):
        shutil.copy(data / f"pairs_{split}.csv", mrpc / f"{split}.csv")
    for name in ("turns", "preferences", "judged", "instructions"):
        (folder / name).mkdir()
        for split in ("train", "validation"):
            shutil.copy(data / f"{name}_{split}.json", folder / name / f"{split}.json")
    _make_more(folder, data, seed=seed)
    for name, parts in _METRICS.items():
        _write_metric(folder, name, *parts)
    _write_sentence_data(folder / "nltk_data" / "tokenizers")
    return folder


def _make_more(folder: Path, data: Path, *, seed: int) -> None:
    """Write pictures, sounds, classifiers, and what LLaMA-Factory and FlagEmbedding read."""
    chance = random.Random(seed)
    save_pictures(folder, chance)
    save_sounds(folder / "sounds", chance)
    save_picture_models(folder / "models", seed=seed)
    save_classifier(folder / "distilroberta-base", num_labels=1, seed=seed)
    save_classifier(folder / "models" / "bert-classifier", num_labels=2, seed=seed)
    for name, columns in (("sentence-transformers/stsb", _SCORED), ("sentences", {"sentence1": "sentence"})):
        (folder / name).mkdir(parents=True)
        for split, source in (("train", "train"), ("validation", "validation"), ("test", "validation")):
            _write_columns(data / f"pairs_{source}.csv", folder / name / f"{split}.csv", columns)
    info = {"made": {"file_name": "instructions_train.json"}}
    shutil.copytree(data, folder / "factory")
    (folder / "factory" / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    (folder / "factory.yaml").write_text(_FACTORY, encoding="utf-8")
    (folder / "axolotl.yaml").write_text(_AXOLOTL, encoding="utf-8")
    _write_texts(folder, data)
    sought = [
        {"query": row["prompt"], "pos": [row["chosen"]], "neg": [row["rejected"]]}
        for row in map(json.loads, (data / "preferences_train.json").read_text(encoding="utf-8").splitlines())
    ]
    (folder / "sought.jsonl").write_text("".join(json.dumps(one) + "\n" for one in sought), encoding="utf-8")


def _write_texts(folder: Path, data: Path) -> None:
    """Write dialogs.jsonl, of messages, instructions.json, a list, and code, a dataset of texts."""
    instructions = (data / "instructions_train.json").read_text(encoding="utf-8").splitlines()
    (folder / "instructions.json").write_text(f"[{','.join(instructions)}]", encoding="utf-8")
    dialogs = [
        [
            {"role": "user" if turn["from"] == "human" else "assistant", "content": turn["value"]}
            for turn in chat["conversations"]
        ]
        for chat in json.loads((data / "chats_train.json").read_text(encoding="utf-8"))
    ]
    lines = [json.dumps({"messages": dialog}) for dialog in dialogs]
    (folder / "dialogs.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    texts = (data / "text_train.txt").read_text(encoding="utf-8").splitlines()
    (folder / "code").mkdir()
    rows = "".join(json.dumps({"content": text}) + "\n" for text in texts if text)
    (folder / "code" / "train.jsonl").write_text(rows, encoding="utf-8")


_SCORED = {"sentence1": "sentence1", "sentence2": "sentence2", "label": "score"}
_FACTORY = """stage: sft
finetuning_type: full
do_train: true
model_name_or_path: models/llama
dataset: made
dataset_dir: factory
template: default
cutoff_len: 64
output_dir: factory_out
overwrite_output_dir: true
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
num_train_epochs: 1
learning_rate: 1.0e-3
logging_steps: 1
save_strategy: "no"
report_to: none
disable_gradient_checkpointing: true
preprocessing_num_workers: 1
"""
_AXOLOTL = """base_model: models/llama
datasets:
  - path: code
    type: completion
    field: content
    split: train
dataset_prepared_path: axolotl_prepared
sequence_len: 64
sample_packing: false
micro_batch_size: 4
gradient_accumulation_steps: 2
num_epochs: 1
max_steps: 6
optimizer: adamw_torch
lr_scheduler: linear
learning_rate: 0.001
warmup_steps: 2
bf16: false
fp16: false
tf32: false
gradient_checkpointing: false
logging_steps: 1
save_strategy: "no"
attn_implementation: eager
seed: 1
"""


def save_labels(cache: Path) -> None:
    """Write the labels of "segments" where huggingface_hub keeps what it has fetched."""
    kept = cache / "hub" / "datasets--segments"
    (kept / "snapshots" / "made").mkdir(parents=True, exist_ok=True)
    (kept / "refs").mkdir(exist_ok=True)
    (kept / "refs" / "main").write_text("made", encoding="utf-8")
    labels = json.dumps(dict(enumerate(("cat", "dog"))))
    (kept / "snapshots" / "made" / "id2label.json").write_text(labels, encoding="utf-8")


def _write_columns(source: Path, target: Path, columns: dict[str, str]) -> None:
    import csv

    with source.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    kept = {**columns, **({} if "label" in columns else {"label": "label"})}
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(kept.values()))
        writer.writeheader()
        for _ in range(4):  # more than a batch of 64 on two ranks
            writer.writerows({new: row[old] for old, new in kept.items()} for row in rows)


def _write_sentence_data(folder: Path) -> None:
    """Write what NLTK's sentence splitter reads, with nothing learnt: NLTK_DATA has to name its folder."""
    (folder / "punkt").mkdir(parents=True)
    english = folder / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (english / name).touch()


def _write_metric(folder: Path, name: str, features: str, equal: str, result: str) -> None:
    path = folder / name / f"{name}.py"
    path.parent.mkdir()
    text = _METRIC.format(class_name=name.capitalize(), features=features, equal=equal, result=result)
    path.write_text(text, encoding="utf-8")
