"""zero_grad() calls that delete the gradients of earlier micro-batches before a step has used them."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from zerofit.core.setting import Confidence
from zerofit.scripts.facts import Action, ClearedGradients, ModelState
from zerofit.scripts.source.reading import ContextEffect
from zerofit.scripts.source.values import ObjectKind, TrackedObject

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.scripts.source.reading import Condition, Reading, RecordedCall

_BACKWARDS = (Action.BACKWARD, Action.BACKWARD_OF_LOSS)
_STEPS = (Action.STEP, Action.STEP_UNKNOWN, Action.STEP_SCALED)


def find_cleared(reading: Reading, seen: RecordedCall) -> ClearedGradients | None:
    """Return the gradients that a zero_grad() deletes too early; None if it may not."""
    if seen.action is not Action.ZERO_GRAD or not seen.loops or seen.tracked is None:
        return None
    place = reading.calls.index(seen)
    before = _until_again(reversed(reading.calls[:place]), seen)
    after = _until_again(reading.calls[place + 1 :], seen)
    if ContextEffect.ACCUMULATES in seen.within:
        return _cleared_in_accumulate(reading, seen, before, after)
    return _cleared_by_hand(reading, seen, before, after)


def _until_again(calls: Iterable[RecordedCall], seen: RecordedCall) -> list[RecordedCall]:
    """Return the calls of the same code up to the next time that it is interpreted."""
    return [
        call for call in takewhile(lambda call: call.node is not seen.node, calls) if call.root == seen.root
    ]


def _cleared_in_accumulate(
    reading: Reading, seen: RecordedCall, before: list[RecordedCall], after: list[RecordedCall]
) -> ClearedGradients | None:
    """Return what is deleted in the micro-batch that steps, which alone obeys a prepared zero_grad()."""
    owner = seen.tracked
    if owner is None or (owner.kind is ObjectKind.OPTIMIZER and not owner.is_prepared):
        return None
    inside = [call for call in after if call.loops == seen.loops and ContextEffect.ACCUMULATES in call.within]
    backward = next(
        (call for call in inside if call.action in _BACKWARDS and _always_before(seen, call)), None
    )
    if backward is None:
        return None
    later = inside[inside.index(backward) :]
    if not any(_updates(call, seen) for call in later):
        return None
    if any(_updates(call, seen) for call in before if call.loops == seen.loops):
        return None
    return ClearedGradients(
        backward=reading.text.snippet(backward.node), confidence=_confidence(reading, seen, backward)
    )


def _always_before(seen: RecordedCall, backward: RecordedCall) -> bool:
    """Return True if each backward() of a micro-batch that steps comes behind this zero_grad()."""
    return all(_is_of_step(condition) for condition in _beyond(seen, backward))


def _is_of_step(condition: Condition) -> bool:
    return not condition.is_else and getattr(condition.test, "attr", "") == "sync_gradients"


def _beyond(seen: RecordedCall, other: RecordedCall) -> list[Condition]:
    """Return the conditions of a call that another is not under."""
    others = {(id(condition.test), condition.is_else) for condition in other.conditions}
    return [
        condition for condition in seen.conditions if (id(condition.test), condition.is_else) not in others
    ]


def _updates(call: RecordedCall, seen: RecordedCall) -> bool:
    """Return True if a call is the optimizer step of what a zero_grad() clears."""
    if call.action not in _STEPS or call.tracked is None or seen.tracked is None:
        return False
    if seen.tracked.kind is not ObjectKind.MODEL:
        return call.tracked is seen.tracked
    return call.tracked.of is not None and call.tracked.of.root is seen.tracked.root


def _cleared_by_hand(
    reading: Reading, seen: RecordedCall, before: list[RecordedCall], after: list[RecordedCall]
) -> ClearedGradients | None:
    """Return what is deleted in each micro-batch, if the step comes once in several."""
    if seen.state is ModelState.ENGINE and seen.tracked is not None and seen.tracked.of is None:
        return None
    around = [*reversed(before), *after]
    backwards = [call for call in around if call.action in _BACKWARDS]
    alike = [call for call in backwards if call.loops == seen.loops]
    backward = next((call for call in alike if not _beyond(seen, call)), None)
    steps = [call for call in around if _updates(call, seen)]
    if (
        backward is None
        or not steps
        or any(call.loops == seen.loops for call in steps if not _every(call, seen))
    ):
        return None
    for step in steps:
        every = _every(step, seen)
        if every is not None:
            if any(condition.test is every.test for call in backwards for condition in call.conditions):
                return None  # its loss is another one, as in a GAN whose generator trains every n-th step
            is_more = every.period is not None and every.period > 1
            is_sure = (is_more or every.period_argument is not None) and not every.is_else
            return _by_hand(reading, seen, backward, step, is_sure=is_sure)
    return _cleared_in_inner_loop(
        reading, seen, backward, backwards, [step for step in steps if step in after]
    )


def _every(step: RecordedCall, seen: RecordedCall) -> Condition | None:
    """Return the condition with which a step comes once in several iterations of a zero_grad()'s loop."""
    if step.loops != seen.loops:
        return None
    return next(
        (
            condition
            for condition in _beyond(step, seen)
            if condition.has_remainder and condition.depth == len(step.loops)
        ),
        None,
    )


def _cleared_in_inner_loop(
    reading: Reading,
    seen: RecordedCall,
    backward: RecordedCall,
    backwards: list[RecordedCall],
    steps: list[RecordedCall],
) -> ClearedGradients | None:
    """Return what is deleted if the micro-batches are a loop of their own, before the step."""
    for step in steps:
        depth = len(step.loops)
        is_around = 0 < depth < len(seen.loops) and seen.loops[:depth] == step.loops
        # The gradients of an attack's inner loop are not those of the step, which has a loss of its own.
        has_own = any(call.loops != seen.loops for call in backwards)
        if is_around and not has_own:
            return _by_hand(reading, seen, backward, step, is_sure=False)
    return None


def _by_hand(
    reading: Reading, seen: RecordedCall, backward: RecordedCall, step: RecordedCall, *, is_sure: bool
) -> ClearedGradients:
    every = _every(step, seen)
    return ClearedGradients(
        backward=reading.text.snippet(backward.node),
        step=reading.text.snippet(step.node),
        every=reading.text.snippet(every.test) if every else None,
        argument=every.period_argument if every else None,
        confidence=_confidence(reading, seen, backward) if is_sure else Confidence.LIKELY,
    )


def _confidence(reading: Reading, seen: RecordedCall, backward: RecordedCall) -> Confidence:
    owner: TrackedObject | None = seen.tracked
    is_known = owner is not None and (owner.is_prepared or owner.kind is not ObjectKind.OTHER)
    depth = len(seen.loops)
    outside = [condition for condition in (*seen.conditions, *backward.conditions) if condition.depth < depth]
    return Confidence.CERTAIN if is_known and not outside and seen.root == 0 else Confidence.LIKELY
