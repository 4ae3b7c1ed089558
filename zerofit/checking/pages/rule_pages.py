"""A rule as a Markdown page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from zerofit.checking.engine import spell
from zerofit.checking.rule import Effect
from zerofit.checking.rules.examples import ACCELERATE_FILE, DEEPSPEED_FILE, SCRIPT_FILE, example_files
from zerofit.core.command import Route
from zerofit.core.overrides import FLAGS
from zerofit.core.strategy import Lora, Strategy
from zerofit.core.text_table import folded_table_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.checking.rule import Example, Reproduction, Rule

_LANGUAGES = {DEEPSPEED_FILE: "json", ACCELERATE_FILE: "yaml", SCRIPT_FILE: "python"}
_CALLS = {
    Route.ACCELERATE: "Accelerator()",
    Route.TRAINER: "Trainer()",
    Route.NATIVE: "deepspeed.initialize()",
}
_SEEN = {
    Effect.FAILS: "the run ends in an error",
    Effect.HANGS: "the run does not end",
    Effect.DIFFERS: "the run succeeds with wrong weights",
    Effect.IGNORED: "the run succeeds, but the setting has no effect",
    Effect.COSTS: "the run succeeds with the right weights, but is slower or larger than necessary",
}


def rule_page(rule: Rule, *, level: int = 1) -> str:
    """Return the page of one rule.

    Args:
        rule: the rule.
        level: heading level of its title.
    """
    lines = [
        f"{'#' * level} {rule.id}",
        "",
        f"**{rule.severity}**: {rule.summary}.",
        "",
        f"- why: {rule.why}",
        f"- fix: {fix_text(rule)}",
        f"- seen: {_seen(rule.evidence)}",
        f"- see: <{rule.see}>",
    ]
    if rule.holds_for:
        lines.append(f"- holds for: {', '.join(f'`{versions}`' for versions in rule.holds_for)}")
    if rule.is_fixed_by_launch:
        lines.append("- `zerofit launch` fixes it inside the run")
    for title, example in (("Violates the rule:", rule.bad), ("Keeps it:", rule.good)):
        lines += ["", title, "", *_example_lines(example)]
    return "\n".join(lines) + "\n"


def rules_table(rules: Sequence[Rule], *, width: int | None = None) -> str:
    """Return a table of rules: severity, id and summary, in lines of at most `width` columns."""
    ordered = sorted(rules, key=lambda rule: rule.id)
    rows = [(rule.severity.value, rule.id, rule.summary) for rule in ordered]
    return "\n".join(folded_table_lines(rows, width=width))


def fix_text(rule: Rule) -> str:
    """Return the fix; settings are spelt as in the rule's bad example: flags or DeepSpeed's keys."""
    return spell(rule.fix, FLAGS if rule.bad.strategy is not None else {})


def _seen(evidence: Reproduction) -> str:
    text = _SEEN[evidence.outcome]
    if evidence.says:
        text += f": `{evidence.says}`"
    if evidence.observed:
        text += ": " + ", ".join(f"`{name}` is {json.dumps(value)}" for name, value in evidence.observed)
    if evidence.not_reproduced:
        text += f" (documented, not reproduced: {evidence.not_reproduced})"
    return text


def _example_lines(example: Example) -> Iterator[str]:
    blocks = [_block(name, _LANGUAGES[name], text) for name, text in example_files(example).items()]
    if command := _command(example):
        blocks.append(("```sh", *command.splitlines(), "```"))
    if circumstances := _circumstances(example):
        blocks.append((f"with {', '.join(circumstances)}",))
    for number, block in enumerate(blocks):
        yield from ("",) * bool(number)
        yield from block


def _block(name: str, language: str, text: str) -> tuple[str, ...]:
    return (f"`{name}`", "", f"```{language}", *text.strip("\n").splitlines(), "```")


def _command(example: Example) -> str:
    if example.strategy is not None:
        return f"zerofit launch {_strategy_flags(example.strategy)} train.py"
    if example.command is None and not example.arguments:
        return ""
    launcher = example.command or "accelerate launch"
    return f"{launcher} train.py {example.arguments}".strip()


def _strategy_flags(strategy: Strategy) -> str:
    words = []
    for field, flag in FLAGS.items():
        value = getattr(strategy, field)
        if field != "engine" and value == getattr(Strategy(), field):
            continue
        is_switch = value is True or value == Lora()
        words.append(flag if is_switch else f"{flag} {getattr(value, 'value', value)}")
    return " ".join(words)


def _circumstances(example: Example) -> list[str]:
    """Return the circumstances of an example beside its files and command."""
    words = []
    if example.route is not None:
        words.append(f"a script that calls {_CALLS[example.route]}")
    if example.topology is not None:
        topology = example.topology
        kind = "CPU" if topology.on_cpu else "GPU"
        words.append(f"{topology.world_size} {kind} rank{'s' * (topology.world_size > 1)}")
        if topology.tensor_parallel_size > 1:
            words.append(f"--tensor-parallel-size {topology.tensor_parallel_size}")
        if topology.sequence_parallel_size > 1:
            words.append(f"--sequence-parallel-size {topology.sequence_parallel_size}")
    if example.machine is not None and example.machine.gpus:
        words.append(f"{example.machine.gpus[0].name} as GPU")
    if example.checkpoint is not None:
        words.append(f"a checkpoint of {example.checkpoint.num_ranks} ranks to resume from")
    words += [f"{package} {version}" for package, version in example.versions.items()]
    return words
