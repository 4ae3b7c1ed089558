"""A hook of mkdocs: on the site, each rule's page with its examples follows the index of rules."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# mkdocs imports a hook by its path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "checking" / "rules"))

from rule_examples import EXAMPLES
from rule_examples.example import (
    ACCELERATE_FILE,
    DEEPSPEED_FILE,
    FSDP_JSON,
    SCRIPT_FILE,
    SHELL_FILE,
    example_files,
    rank_flags,
    strategy_flags,
)

from tools.rules_index import rules_index
from zerofit.checking.rule_pages import rule_page
from zerofit.checking.rules import ALL_RULES
from zerofit.core.command import Route

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rule_examples.example import Example, Examples

    from zerofit.checking.rule import Rule

_LANGUAGES = {
    DEEPSPEED_FILE: "json",
    FSDP_JSON: "json",
    ACCELERATE_FILE: "yaml",
    SCRIPT_FILE: "python",
    SHELL_FILE: "sh",
}
_OPENING = re.compile(rf"^```(?:{'|'.join(sorted(set(_LANGUAGES.values())))})$", re.MULTILINE)
_CALLS = {
    Route.ACCELERATE: "Accelerator()",
    Route.TRAINER: "Trainer()",
    Route.NATIVE: "deepspeed.initialize()",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the whole reference in place of the index that is in git, without colours.

    A thousand blocks in colour are 2 MB of marks more, which a browser takes long to show.
    """
    if page.file.src_uri != "reference/rules.md":
        return markdown
    return _OPENING.sub("```text", rules_reference(ALL_RULES, EXAMPLES))


def rules_reference(rules: Sequence[Rule], examples: Mapping[str, Examples]) -> str:
    """Return the site's page: the index, then each rule's page with its examples."""
    index = rules_index(rules, lambda rule: f"[{rule.id}](#{rule.id})")
    ordered = sorted(rules, key=lambda rule: rule.id)
    return "\n".join((index, *(page_with_examples(rule, examples[rule.id]) for rule in ordered)))


def page_with_examples(rule: Rule, examples: Examples, *, level: int = 2) -> str:
    """Return a rule's page, followed by its bad and its good example."""
    lines = []
    for title, example in (("Violates the rule:", examples.bad), ("Keeps it:", examples.good)):
        lines += ["", title, "", *_example_lines(example)]
    return rule_page(rule, level=level) + "\n".join(lines) + "\n"


def command_of(example: Example) -> str:
    """Return the command that runs an example, if it says more than its files; else nothing."""
    if example.ranks is not None:
        return f"zerofit launch {rank_flags(example.ranks)} train.py"
    if example.strategy is not None:
        return f"zerofit launch {strategy_flags(example.strategy)} train.py"
    if example.command is None and not example.arguments:
        return ""
    launcher = example.command or "accelerate launch"
    return f"{launcher} train.py {example.arguments}".strip()


def _example_lines(example: Example) -> Iterator[str]:
    files = example_files(example) | ({} if example.shell is None else {SHELL_FILE: example.shell})
    blocks = [_block(name, _LANGUAGES[name], text) for name, text in files.items()]
    if command := command_of(example):
        blocks.append(("```sh", *command.splitlines(), "```"))
    if circumstances := _circumstances(example):
        blocks.append((f"with {', '.join(circumstances)}",))
    for number, block in enumerate(blocks):
        yield from ("",) * bool(number)
        yield from block


def _block(name: str, language: str, text: str) -> tuple[str, ...]:
    return (f"`{name}`", "", f"```{language}", *text.strip("\n").splitlines(), "```")


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
