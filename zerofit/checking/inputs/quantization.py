"""Whether a run quantizes its model by bitsandbytes: by its arguments, its recipe or its script's source."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.inputs.script_arguments import given_argument, is_on
from zerofit.core.setting import Confidence
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from zerofit.checking.situation import Situation
    from zerofit.core.setting import Said

_COUNTS = ("bits", "quantization_bit", "quant_bits")
"""Arguments of public scripts whose value is the number of bits."""
_SWITCHES = {
    4: ("load_in_4bit", "use_4bit", "use_qlora", "q_lora", "qlora"),
    8: ("load_in_8bit", "use_8bit"),
}
"""Arguments that quantize to this number of bits if they are on."""


def arguments_of_bits(situation: Situation, bits: int) -> Iterator[Said[Any]]:
    """Yield the arguments that by their names quantize the model to a number of bits."""
    for name in _COUNTS:
        said = given_argument(situation, name)
        if said is not None and str(said.value) == str(bits):
            yield said
    for name in _SWITCHES[bits]:
        said = given_argument(situation, name)
        if said is not None and is_on(said):
            yield said


def quantizes_to(situation: Situation, bits: int) -> Said[Any] | None:
    """Return what quantizes the model to a number of bits; None if nothing is known to."""
    script = situation.script
    for call in script.find(Action.QUANTIZE) if script is not None else ():
        keyword = call.keyword(f"load_in_{bits}bit")
        if keyword is not None and keyword.value is True and not call.is_engine_checked:
            sure = Confidence.CERTAIN if call.is_in_each_run else Confidence.LIKELY
            return replace(keyword.said, confidence=sure)
    said = next(arguments_of_bits(situation, bits), None)
    return None if said is None else replace(said, confidence=Confidence.LIKELY)
