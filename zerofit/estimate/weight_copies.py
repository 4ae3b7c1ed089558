"""terms_of: the term of each storage of a log; the 16-bit copies of weights under autocast have their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.allocation_log import TensorKind

if TYPE_CHECKING:
    from zerofit.allocation_log import AllocationLog

WEIGHT_COPIES = "16-bit weight copies"
_CAST = "aten._to_copy.default"
_FP32 = 4
_MADE_FORWARD = (TensorKind.ACTIVATION, TensorKind.RECOMPUTED)


def terms_of(log: AllocationLog) -> list[str]:
    """Return the name of each storage's term: its kind's, or WEIGHT_COPIES.

    A storage is taken for such a copy if a cast made it, in the forward pass of a module that holds an fp32
    parameter of as many elements, two bytes each, whatever the micro-batch.
    """
    terms = [kind.value for kind in log.storages.kinds]
    if _CAST not in log.operators:
        return terms
    storages, cast = log.storages, log.operators.index(_CAST)
    copies = [
        {2 * log.parameters[number].num_elements for number in numbers if _is_fp32(log, number)}
        for numbers in log.module_parameters
    ]
    for index, operator in enumerate(storages.operators):
        if operator != cast or storages.bytes_per_sample[index] or storages.modules[index] < 0:
            continue
        if (
            storages.fixed_bytes[index] in copies[storages.modules[index]]
            and storages.kinds[index] in _MADE_FORWARD
        ):
            terms[index] = WEIGHT_COPIES
    return terms


def _is_fp32(log: AllocationLog, parameter: int) -> bool:
    return log.parameters[parameter].bytes_per_element == _FP32
