"""The figures of docs/measured-costs.md on length bucketing are those that benchmarks/bucketing.py finds."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_PAGE = " ".join((_ROOT / "docs" / "measured-costs.md").read_text("utf-8").split())
_ROWS = {
    "fixed": "all to 512 tokens",
    "dynamic": "each batch to its longest",
    "bucketed": "each batch to its longest, with length bucketing",
    "packed": "packed into rows of 512, 1,000 documents at a time",
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("bucketing", _ROOT / "benchmarks" / "bucketing.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where its dataclass looks for itself
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_shares_of_padding_and_says_of_what(benchmark: Any) -> None:
    for way, (plain, rounded) in benchmark.shares_of_padding().items():
        assert f"| {_ROWS[way]} | {plain:.1%} | {rounded:.1%} |" in _PAGE
    sizes = benchmark.SHARES
    assert (
        f"{sizes['num_samples']:,} synthetic samples of {sizes['shortest']} to {sizes['longest']} tokens "
        f"(lognormal with a median of {sizes['median']} and a sigma of {sizes['spread']}"
    ) in _PAGE


def test_the_page_has_the_speeds_that_were_measured() -> None:
    measured = json.loads((_ROOT / "benchmarks" / "measured" / "bucketing.json").read_text("utf-8"))
    bert, gpt2 = measured["models"]["BERT, classifier"], measured["models"]["GPT-2"]
    speeds = {
        name: [f"{model['ways'][way]['real_tokens_per_s']:,.0f}" for way in ("fixed", "dynamic", "bucketed")]
        for name, model in (("bert", bert), ("gpt2", gpt2))
    }
    fixed, dynamic, bucketed = speeds["bert"]
    ratio = bert["bucketed_over_fixed"]
    assert (
        f"trained {fixed} real tokens per second with all rows at {measured['lengths']['longest']}" in _PAGE
    )
    assert f"{dynamic} with each batch at its longest, and {bucketed} with length bucketing" in _PAGE
    assert (
        f"{ratio['speed']:.1f} times the first, which computes {ratio['tokens']:.1f} times the tokens"
        in _PAGE
    )
    assert f"went from {speeds['gpt2'][0]} to {speeds['gpt2'][2]}" in _PAGE
    lengths = measured["lengths"]
    assert (
        f"{measured['num_samples']} samples (lognormal, median {lengths['median']}, "
        f"sigma {lengths['spread']}), batches of {measured['batch_size']}"
    ) in _PAGE
