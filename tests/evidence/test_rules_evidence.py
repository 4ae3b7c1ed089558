"""Each rule's bad example goes wrong as the rule says, and its good one trains to the unsharded reference."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from harness.prove import prove
from harness.table import read_table, stale_rows, write_table
from rule_examples import EXAMPLES

from zerofit.checking.rules import ALL_RULES, Rule
from zerofit.machine.probe_toolchain import find_cxx, has_libaio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.runner import Runner

_BY_ID = {rule.id: rule for rule in ALL_RULES}
TELLING = (
    pytest.param("deepspeed-key-rejected", marks=pytest.mark.slow),
    "deepspeed-key-misspelt",
    "param-offload-needs-zero3",
    "accumulation-needs-accumulate",
    "zero3-model-made-whole",
    pytest.param("all-ranks-must-meet", marks=pytest.mark.slow),
)
"""Rules of each outcome whose examples are quick to run: what `make test-long` proves."""


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, Any]]:
    """Collect the rows that were proven, and write them into the table at the end."""
    rows: dict[str, Any] = {}
    yield rows
    write_table(rows, ALL_RULES)


@pytest.mark.evidence
@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.id)
def test_rule_has_its_evidence(rule: Rule, runner: Runner, rows: dict[str, Any]) -> None:
    if rule.id == "fp16-needs-gpu" and torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("DeepSpeed trains in fp16 on this CPU: it has AVX512-FP16")
    if "nvme" in rule.id and not has_libaio(cxx=find_cxx(environ=os.environ)[1], environ=os.environ):
        pytest.skip("offload to NVMe needs libaio-dev")
    rows[rule.id] = prove(rule, EXAMPLES[rule.id], runner)


@pytest.mark.long
@pytest.mark.parametrize("name", TELLING)
def test_telling_rule_has_its_evidence(name: str, runner: Runner) -> None:
    assert prove(_BY_ID[name], EXAMPLES[name], runner)["verdict"] == "reproduced"


def test_the_table_is_of_the_present_rules() -> None:
    stale = stale_rows(ALL_RULES, EXAMPLES, read_table())
    assert stale == [], "run: make evidence"
