"""FSDP2 as measured: one script in many ways on two and four CPU ranks, against one process."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
from covered_runs import Case, Trained, distance, train_by_itself, train_under_zerofit
from runs import ROOT

if TYPE_CHECKING:
    from pathlib import Path

MEASURED = ROOT / "tests" / "evidence" / "measured" / "fsdp2_runs.json"
_LOSS, _LOSS_OF_TRAINER = 2e-5, 1e-4
"""Tolerances, relative; Trainer sums and rounds what it logs."""
_WAY = 1e-5
"""Of the weights in the end, against the way that training took them."""


def _case(layout: str, route: str, way: tuple[str, ...], precision: str = "no") -> Case:
    """Return the case; a loop's batches weigh alike on all ranks, as its own mean over them does, and are not
    bucketed, as each number of ranks has other buckets."""
    if route == "loop":
        way = (*(name for name in way if name != "bucketed"), "even")
    return Case(layout, route, way, precision)


_CASES = (
    _case("fsdp", "trainer", ("split", "accumulated")),
    _case("fsdp", "trainer", ("lora", "accumulated")),
    _case("fsdp", "trainer", ("resumed",)),
    _case("fsdp", "loop", ()),
    _case("fsdp", "loop", ("checkpointed",)),
    _case("fsdp", "loop", ("frozen",)),
    _case("fsdp-kept", "trainer", ()),
    _case("fsdp-kept", "trainer", ("checkpointed",)),
    _case("fsdp-kept", "trainer", ("frozen", "bucketed")),
    _case("fsdp-kept", "loop", ("split", "accumulated")),
    _case("hybrid", "trainer", ("split", "accumulated")),
    _case("hybrid", "trainer", ("lora", "accumulated")),
)


_ROUGH = (
    Case("fsdp", "loop", ("even",), "bf16"),
    Case("fsdp", "trainer", ("even",), "bf16"),
    Case("fsdp", "loop", ("even", "quantized"), "bf16"),
    Case("fsdp", "loop", ("even", "quantized", "resumed"), "bf16"),
    Case("fsdp", "trainer", ("even", "qlora"), "bf16"),
    Case("fsdp", "trainer", ("even", "qlora", "resumed"), "bf16"),
)
"""In bf16 and on a base in nf4 ranks that share batches round otherwise than one process, as DDP's do."""
_SEEDS = 3
"""Of a measured row: the distance of one seed's losses is mostly chance."""
_FROM_ONE_RANK, _FROM_ONE_PROCESS = 2.0, 2.5
"""Limits, against DDP's distance from one process. FSDP2 on one rank is at 2.1 of it already: its policy
casts weights to bf16 before the forward pass, where autocast keeps embeddings and norms in fp32."""


def _name(case: Case) -> str:
    changes = (name for name in case.changes if name != "even")
    return ", ".join((case.layout, case.route, case.precision, *changes))


def _losses_apart(seen: Trained, alone: Trained) -> list[float]:
    """Return the relative difference of each step's loss."""
    last = alone.steps[-len(seen.steps) :]
    return [abs(ours - theirs) / theirs for (ours, _), (theirs, _) in zip(seen.steps, last, strict=True)]


def _far(seen: Trained, alone: Trained) -> float:
    """Return how far the saved weights are apart, against their length."""
    assert seen.weights.keys() == alone.weights.keys()
    pairs = [(seen.weights[name].double(), weight.double()) for name, weight in alone.weights.items()]
    apart = sum(float((ours - theirs).square().sum()) for ours, theirs in pairs)
    return (apart / sum(float(theirs.square().sum()) for _, theirs in pairs)) ** 0.5


def _root_mean_square(values: list[float]) -> float:
    return (sum(value**2 for value in values) / len(values)) ** 0.5


def _beside_ddp(case: Case, model: Path, folder: Path, num_seeds: int) -> dict[str, float]:
    """Return how far a case is from one process under zerofit and from FSDP2 on one rank, and how far DDP in
    its place is from one process: root mean squares over seeds, of losses over steps too."""

    def train(layout: str, seed: int) -> Trained:
        changes = tuple(name for name in case.changes if layout == case.layout or name != "resumed")
        (folder / f"{layout}-{seed}").mkdir(parents=True)
        trained = replace(case, layout=layout, changes=changes, seed=seed)
        seen = train_under_zerofit(trained, model, folder / f"{layout}-{seed}")
        assert seen.applied == (), layout
        return seen

    losses: dict[str, list[float]] = defaultdict(list)
    weights: dict[str, list[float]] = defaultdict(list)
    for seed in range(num_seeds):
        alone, ddp, one_rank, seen = (
            train(layout, seed) for layout in ("one", "ddp", "fsdp-alone", case.layout)
        )
        for name, pair in {
            "": (seen, alone),
            " from one rank": (seen, one_rank),
            " of DDP": (ddp, alone),
        }.items():
            losses[name] += _losses_apart(*pair)
            weights[name].append(_far(*pair))
    found = {f"loss{name}": _root_mean_square(values) for name, values in losses.items()}
    found |= {f"weights{name}": _root_mean_square(values) for name, values in weights.items()}
    return {name: float(f"{value:.1e}") for name, value in found.items()}


def _too_far(row: dict[str, float], *, what: tuple[str, ...]) -> set[str]:
    """Return what is farther than the limits allow."""
    limits = {"": _FROM_ONE_PROCESS, " from one rank": _FROM_ONE_RANK}
    return {
        f"{kind}{end}"
        for kind in what
        for end, limit in limits.items()
        if row[f"{kind}{end}"] > limit * row[f"{kind} of DDP"]
    }


@pytest.mark.timeout(7200)
@pytest.mark.evidence
def test_all_runs(covered_model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    @cache
    def alone(route: str, changes: tuple[str, ...], precision: str) -> Trained:
        case = Case("one", route, tuple(name for name in changes if name != "resumed"), precision)
        return train_by_itself(case, covered_model, tmp_path_factory.mktemp("alone"))

    rows = {}
    for case in _CASES:
        seen = train_under_zerofit(case, covered_model, tmp_path_factory.mktemp("run"))
        assert seen.applied == (), _name(case)
        expected = alone(case.route, case.changes, case.precision)
        rows[_name(case)] = {
            "loss": float(f"{max(_losses_apart(seen, expected)):.1e}"),
            "weights": float(f"{distance(expected, seen):.1e}"),
        }
        MEASURED.write_text(json.dumps(rows, indent=1) + "\n")
    for case in _ROUGH:
        rows[_name(case)] = _beside_ddp(case, covered_model, tmp_path_factory.mktemp("run"), _SEEDS)
        MEASURED.write_text(json.dumps(rows, indent=1) + "\n")


def _measured() -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = json.loads(MEASURED.read_text())
    return rows


def test_what_was_measured_has_every_run() -> None:
    assert list(_measured()) == [_name(case) for case in (*_CASES, *_ROUGH)]


def test_in_fp32_each_run_is_that_of_one_process() -> None:
    wrong = {}
    for name, row in _measured().items():
        tolerance = _LOSS_OF_TRAINER if "trainer" in name else _LOSS
        if ", no" in name and (row["loss"] > tolerance or row["weights"] > _WAY):
            wrong[name] = row
    assert wrong == {}


def test_in_16_bits_no_run_is_more_than_twice_as_far_from_one_rank_as_ddp_from_one_process() -> None:
    rows = _measured()
    found = {name: _too_far(rows[name], what=("loss", "weights")) for name in map(_name, _ROUGH)}
    assert {name for name, what in found.items() if what} == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case for case in _ROUGH if replace(case, changes=(*case.changes, "resumed")) not in _ROUGH],
    ids=_name,
)
def test_in_16_bits_the_weights_of_a_run_now_are_at_most_twice_as_far_as_ddps(
    case: Case, covered_model: Path, tmp_path: Path
) -> None:
    row = _beside_ddp(case, covered_model, tmp_path, num_seeds=1)
    assert _too_far(row, what=("weights",)) == set(), row
