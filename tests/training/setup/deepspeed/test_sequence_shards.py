"""Models in parts of a sequence, on two gloo ranks without DeepSpeed; test_sequence_parallel.py launches."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grouped_results import GroupedResults
from runs import run_on_ranks

from zerofit.training.setup.deepspeed.sequence_shards import Shards

_RANKS = Path(__file__).parents[3] / "support" / "ranks_of_shards.py"
_BATCHES = ("even", "odd", "right", "left", "packed", "packed odd", "restarting", "no labels", "checkpointed")
_SHARED = (
    *("llama", "one key-value head", "six heads", "tied", "qwen2", "qwen3", "mistral", "sliding window"),
    *("gpt2", "gpt_neox", "phi3", "mixtral"),
)
_QUICK = ("llama", "tied", "gpt2")
"""Of _SHARED; the others are slow."""
_REFUSED = {
    "three heads": ("sequence-parallel-heads", "inside attention each rank has whole heads, for all tokens"),
    "gemma2": ("sequence-parallel-attention", "its masks only cover the tokens of one rank"),
    "recurrent": ("sequence-parallel-model", "it has no causal attention"),
    "alibi": ("sequence-parallel-model", "a forward pass on a part of the tokens fails"),
    "hybrid": ("sequence-parallel-model", "its logits differ by"),
}
_ALWAYS = "stage 0"
"""A result of every run."""
_CLOSE = 1e-5
"""Of losses near 5, logits near 1, and gradients relative to the largest; 1e-6 is seen."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    def run(*kinds: str) -> dict[str, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("shards")
        run_on_ranks(_RANKS, folder, str(folder), *(kind for kind in kinds if kind != _ALWAYS))
        return dict(json.loads((folder / "results.json").read_text()))

    others = tuple(kind for kind in _SHARED if kind not in _QUICK)
    return GroupedResults(run, (*_QUICK, *_REFUSED, _ALWAYS), others)


@pytest.mark.parametrize("batch", _BATCHES)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in _QUICK else pytest.mark.slow) for kind in _SHARED]
)
def test_parts_make_the_loss_and_gradients_of_the_whole(
    kind: str, batch: str, results: dict[str, Any]
) -> None:
    assert all(difference < _CLOSE for difference in results[kind][batch].values()), results[kind][batch]


@pytest.mark.parametrize("kind", _REFUSED)
def test_a_model_that_would_train_something_else_is_refused(kind: str, results: dict[str, Any]) -> None:
    rule, why = _REFUSED[kind]
    assert (results[kind]["rule"], results[kind]["why"][: len(why)]) == (rule, why)


def test_gradients_are_clipped_by_the_norm_of_one_copy_of_the_model(
    results: dict[str, dict[str, Any]],
) -> None:
    assert results[_ALWAYS]["clipped norm"] == pytest.approx(5)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("vocabulary", [16, 50_257])
def test_a_model_is_tried_with_samples_that_differ(num_ranks: int, vocabulary: int) -> None:
    """A model that mixes up its samples would go unnoticed with equal ones."""
    asked = []

    def run(**inputs: Any) -> dict[str, Any]:
        asked.append(inputs["input_ids"])
        return {"logits": torch.nn.functional.one_hot(inputs["input_ids"], vocabulary).float(), "loss": 1.0}

    shards = object.__new__(Shards)
    shards._model, shards._size = torch.nn.Linear(1, 1), num_ranks
    shards._config = SimpleNamespace(vocab_size=vocabulary)
    shards.forward = lambda run, inputs: run(**inputs)  # type: ignore[method-assign]
    shards.check(run)
    first, second = asked[0]
    assert (first != second).all()
    assert asked[0].max() < vocabulary
