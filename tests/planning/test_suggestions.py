"""Changes that are tried where nothing fits, and their words."""

from __future__ import annotations

from planning_problems import problem

from zerofit.planning.suggestions import _more_gpus


def test_more_gpus_than_a_node_has_are_suggested_with_their_nodes() -> None:
    texts = [change.text for change, _ in _more_gpus(problem(num_gpus=4, global_batch_size=None))]
    name = "NVIDIA A100-SXM4-80GB"
    assert texts[:5] == [
        *(f"{number} x {name} in place of 4" for number in (5, 6, 7, 8)),
        f"16 x {name} on 2 nodes in place of 4",
    ]
    assert texts[5] == f"24 x {name} on 3 nodes in place of 4"
