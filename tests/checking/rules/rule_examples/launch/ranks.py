"""Examples of the rules of zerofit/checking/rules/launch/ranks.py."""

from __future__ import annotations

from rule_examples.example import LANGUAGE, Example, Examples
from zerofit.checking.situation import RankCounts


def _on_two_gpus(world_size: int) -> Example:
    ranks = RankCounts(world_size=world_size, text=f"--num-processes {world_size}", gpus_per_node=2)
    return Example(ranks=ranks, script=LANGUAGE)


EXAMPLES = {
    "more-ranks-than-gpus": Examples(
        bad=_on_two_gpus(3),
        good=_on_two_gpus(2),
    ),
}
