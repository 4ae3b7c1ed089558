"""What is checked of a ladder before it runs: its lengths, its ranks, and the rules of zerofit check."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.engine import check
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.core.errors import UserError
from zerofit.core.plan import Topology
from zerofit.core.setting import Said
from zerofit.core.strategy import Engine
from zerofit.models.dimensions import check_sequence_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.core.facts import ModelFacts, Versions
    from zerofit.measuring.rungs import Step

_BELOW = "put zero-1, zero-2 or zero-3 before {rung}, and leave --alone out; or leave {rung} out"
_FIXES = {
    "zero-needs-deepspeed": _BELOW,
    "optimizer-offload-needs-zero": _BELOW,
    "param-offload-needs-zero3": "put zero-3 before offload-param, or leave offload-param out",
    "offload-needs-adam": "leave out the rung of another optimizer, or offload-optimizer",
    "fp16-needs-gpu": "leave fp16 out, name bf16 in its place, or measure on a GPU",
}
"""What to do about a broken rule, in the words of rungs: a rule's own fix names settings of other verbs."""
_OTHER_FIX = "leave {rung} out, or what it does not go with"
_OWN_OPTIMIZER: Said[str | None] = Said(value="torch.AdamW", text="the ladder's AdamW")


def check_steps(
    steps: Sequence[Step], facts: ModelFacts, *, num_ranks: int, on_cpu: bool, versions: Versions
) -> None:
    """Check all rungs of a ladder.

    Args:
        steps: each rung with what it runs under.
        facts: of the model.
        num_ranks: of --ranks.
        on_cpu: whether they run on the CPU.
        versions: what is installed.

    Raises:
        UserError: the model has too few positions for a rung, or one has no ranks.
        ExceptionGroup: of one UserError for each broken rule of the first rung that breaks some.
    """
    topology = Topology(world_size=num_ranks, on_cpu=on_cpu)
    for step in steps:
        _check_length(facts, step)
        _check_rules(step, topology, versions)
        if num_ranks > 1 and step.run.strategy.engine is not Engine.DEEPSPEED:
            raise _no_ranks(step, num_ranks)


def _check_length(facts: ModelFacts, step: Step) -> None:
    """Check that the model has positions for a rung's samples, and name the rung where it has not."""
    try:
        check_sequence_length(facts, step.run.sequence_length, None)
    except UserError as error:
        raise UserError(
            error.rule,
            error.summary,
            found=f"--rungs with {step.rung.name} and --model {facts.name}",
            why=error.why,
            fix=f"name length-{facts.max_sequence_length} or less",
        ) from None


def _check_rules(step: Step, topology: Topology, versions: Versions) -> None:
    """Hold a rung of DeepSpeed, or one that offloads, against the rules.

    What is missing here of the other rungs their processes say, and the ladder goes on.
    """
    strategy = step.run.strategy
    if strategy.engine is not Engine.DEEPSPEED and not strategy.offloads:
        return
    situation = situation_of_strategy(
        strategy, topology=topology, versions=versions, own_optimizer=_OWN_OPTIMIZER
    )
    errors = check(situation, rules=ALL_RULES).of(Severity.ERROR)
    if errors:
        raise ExceptionGroup(
            "rungs that do not work",
            [
                UserError(
                    one.rule,
                    one.summary,
                    found=f"--rungs with {step.rung.name}, {_engine_words(step)}",
                    why=one.why,
                    fix=_FIXES.get(one.rule, _OTHER_FIX).format(rung=step.rung.name),
                    see=one.see,
                )
                for one in errors
            ],
        )


def _engine_words(step: Step) -> str:
    strategy = step.run.strategy
    is_plain = strategy.engine is not Engine.DEEPSPEED
    return "which trains in plain PyTorch" if is_plain else f"under ZeRO-{strategy.zero_stage.value}"


def _no_ranks(step: Step, num_ranks: int) -> UserError:
    return UserError(
        "ladder-ranks-need-zero",
        "a rung of many ranks needs ZeRO",
        found=f"--ranks {num_ranks} and --rungs with {step.rung.name}, which trains in plain PyTorch",
        why="among collectives that exchange nothing, DeepSpeed alone takes what rank 0 of many takes",
        fix="begin with zero-1, zero-2 or zero-3, and leave baseline out; or leave --ranks out",
    )
