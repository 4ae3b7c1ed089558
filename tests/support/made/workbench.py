"""A folder in which scripts find made models, datasets and metrics under their names on the hub."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from made.data import save_data
from made.models import KINDS, save_model

if TYPE_CHECKING:
    from pathlib import Path

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
    "sacrebleu": (_TEXT_AND_TEXTS, "one in other", f'{{"score": {_RATIO}}}'),
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
    for name, parts in _METRICS.items():
        _write_metric(folder, name, *parts)
    _write_sentence_data(folder / "nltk_data" / "tokenizers")
    return folder


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
