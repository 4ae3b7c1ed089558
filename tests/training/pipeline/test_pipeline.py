"""Two pipelines on four gloo ranks, without a launch: what they compute, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grouped_results import GroupedResults
from runs import run_on_ranks

from zerofit.training.pipeline.batches import micro_batches_of

_RANKS = Path(__file__).parents[2] / "support" / "ranks_of_pipeline.py"
_CLOSE = 1e-6
"""Of losses near 5, of norms, and of gradients relative to the largest; 5e-7 is seen."""
_CLOSE_IN_BF16 = 1e-2
"""Parts of gradients are rounded to 8 bits before they are summed; 4e-3 of the largest is seen."""
_ROWS_OF_PASSES = {
    "tied": [1] * 8,
    "gpt2": [1] * 8,
    "mixtral": [1] * 8,
    "eleven rows, three a pass": [3] * 4,
    "nine rows": [2] * 5,
    "one row": [1] * 2,
    "padded on the left": [1] * 5,
    "padded on the right": [2] * 4,
    "one row of positions": [1] * 8,
    "frozen first stage": [1] * 8,
    "frozen last stage": [1] * 8,
    "compiled": [1] * 8,
    "unequal stages": [1] * 8,
    "interleaved": [1] * 16,
    "interleaved, five rows": [1] * 12,
}
_REFUSED = {
    "logits": "pipeline-logits-in-training",
    "logits by name": "pipeline-logits-in-training",
    "rows in another order": "pipeline-batches-differ",
    "hidden states": "pipeline-inner-values",
    "embeddings": "pipeline-needs-input-ids",
    "odd argument": "pipeline-input-shape",
    "router": "pipeline-router-loss",
    "second router": "pipeline-router-loss",
    "fp16": "pipeline-trains-in-fp16",
    "no labels": "pipeline-needs-labels",
    "copy": "pipeline-copied-model",
    "copy saved": "pipeline-saves-a-part",
    "clock": "pipeline-generates-by-clock",
    "optimizer": "pipeline-foreign-parameters",
}


_QUICK = (
    *("tied", "eleven rows, three a pass", "padded on the left", "frozen first stage"),
    *("interleaved", "bf16", "gradient on one copy", "timeouts", "generated alone", "saved", "refusals"),
    "interleaved, generated",
)
"""Cases of each kind; the others are slow."""
_OTHERS = (
    *(case for case in _ROWS_OF_PASSES if case not in _QUICK),
    *("interleaved, bf16", "generated", "interleaved, saved", "evaluated", "interleaved, evaluated"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank found, by case."""

    def run(*cases: str) -> dict[str, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("pipelines")
        run_on_ranks(_RANKS, folder, str(folder), *cases, num_ranks=4)
        found: dict[str, list[dict[str, Any]]] = {}
        for path_of_rank in sorted(folder.glob("*-[0-3].json"), key=lambda one: one.stem.split("-")[::-1]):
            for case, result in json.loads(path_of_rank.read_text()).items():
                found.setdefault(case, []).append(result)
        return found

    return GroupedResults(run, _QUICK, _OTHERS)


def _marked(*cases: str) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow if case in _OTHERS else ()) for case in cases]


@pytest.mark.parametrize("case", _marked(*_ROWS_OF_PASSES))
def test_two_pipelines_make_the_loss_and_gradients_of_one_process(case: str, results: dict[str, Any]) -> None:
    """Of two batches, one for each pipeline; tied embeddings have the same gradient at both ends."""
    assert len(results[case]) == 4
    for rank in results[case]:
        assert rank["same have one"]
        assert rank["rows"] == _ROWS_OF_PASSES[case]
        assert max(rank["loss"], rank["gradients"], rank["norm"]) < _CLOSE


@pytest.mark.parametrize("case", _marked("bf16", "interleaved, bf16"))
def test_bf16_under_autocast_has_gradients_on_every_stage(case: str, results: dict[str, Any]) -> None:
    for rank in results[case]:
        assert rank["same have one"]
        assert max(rank["loss"], rank["gradients"], rank["norm"]) < _CLOSE_IN_BF16


def test_copies_without_a_gradient_take_part_in_its_mean(results: dict[str, Any]) -> None:
    """Else the ranks of one copy would wait for the others, or average other parameters."""
    assert results["gradient on one copy"] == 4 * [{"others have none": True, "mean": 0.5}]


def test_groups_of_ranks_have_the_time_out_of_the_default_group(results: dict[str, Any]) -> None:
    assert results["timeouts"] == 4 * [{"seconds": 4 * [333.0]}]


@pytest.mark.parametrize("case", _marked("generated", "interleaved, generated"))
def test_stages_generate_without_a_cache_and_draw_the_same_tokens(case: str, results: dict[str, Any]) -> None:
    ranks = results[case]
    assert all(rank["is_greedy"] and rank["keeps_cache"] for rank in ranks)
    assert ranks[0]["sampled"] == ranks[1]["sampled"]
    assert ranks[2]["sampled"] == ranks[3]["sampled"]
    assert ranks[0]["sampled"] != ranks[2]["sampled"]  # pipelines with random states of their own


def test_generation_on_one_stage_alone_is_an_error_on_it(results: dict[str, Any]) -> None:
    assert [rank.get("rule") for rank in results["generated alone"]] == 2 * [
        "generate-not-on-all-ranks",
        None,
    ]


def test_weights_are_saved_whole_by_all_ranks_and_by_one_alone_not_at_all(results: dict[str, Any]) -> None:
    first, *others = results["saved"]
    assert first["files"] == 3 * [True]
    assert first["weights"] == len(first["weights"]) * [True] != []
    assert first["rule"] == "pipeline-saves-on-all-ranks"
    assert "rank 0 alone" in first["found"]
    assert others == 3 * [{"weights": [], "files": []}]


@pytest.mark.slow
def test_interleaved_stages_are_saved_whole(results: dict[str, Any]) -> None:
    first, *others = results["interleaved, saved"]
    assert first == {"files": 3 * [True], "weights": len(first["weights"]) * [True]}
    assert len(first["weights"]) > 30
    assert others == 3 * [{"weights": [], "files": []}]


@pytest.mark.parametrize("what", _REFUSED)
def test_what_stages_can_not_do_is_refused_on_every_rank(what: str, results: dict[str, Any]) -> None:
    assert [rank[what] for rank in results["refusals"]] == 4 * [_REFUSED[what]]


def test_an_output_without_logits_says_so_to_scripts_that_ask(results: dict[str, Any]) -> None:
    assert [(rank["hasattr"], rank["unpacked"]) for rank in results["refusals"]] == 4 * [(False, 1)]


@pytest.mark.parametrize("case", _marked("evaluated", "interleaved, evaluated"))
def test_evaluation_gives_the_whole_models_logits_or_the_loss_alone(
    case: str, results: dict[str, Any]
) -> None:
    for rank in results[case]:
        assert max(rank["logits"], rank["loss"]) < _CLOSE
        assert rank["alone"] == [True, True]
        (note,) = rank["noted"]
        assert note.endswith("ran the backward pass too, and returned the loss without logits")


@pytest.mark.parametrize(
    ("rows", "most_rows", "num_ranks", "expected", "interleaved"),
    [
        (8, None, 2, (8, 1), (8, 1)),
        (64, None, 2, (8, 8), (8, 8)),
        (9, None, 2, (5, 2), (6, 2)),
        (1, None, 4, (4, 1), (4, 1)),
        (3, None, 4, (4, 1), (4, 1)),
        (4, 3, 2, (2, 2), (2, 2)),
        (11, 3, 2, (4, 3), (4, 3)),
        (8, 8, 2, (2, 4), (2, 4)),
        (9, 1, 2, (9, 1), (10, 1)),
    ],
)
def test_micro_batches_are_equal_and_enough_for_all_ranks(
    rows: int,
    most_rows: int | None,
    num_ranks: int,
    expected: tuple[int, int],
    interleaved: tuple[int, int],
) -> None:
    assert micro_batches_of(rows, most_rows=most_rows, num_ranks=num_ranks) == expected
    in_rounds = micro_batches_of(rows, most_rows=most_rows, num_ranks=num_ranks, is_interleaved=True)
    assert in_rounds == interleaved


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_no_micro_batch_is_larger_than_asked_for(num_ranks: int) -> None:
    for rows in range(1, 40):
        for most_rows in (None, *range(1, 12)):
            passes, size = micro_batches_of(rows, most_rows=most_rows, num_ranks=num_ranks)
            assert size <= (most_rows or rows)
            assert passes >= num_ranks
            assert 0 <= passes * size - rows < max(size, num_ranks * size)
