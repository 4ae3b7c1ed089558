"""Rules on TRL's GRPOConfig and RLOOConfig: groups of generations, and the GPUs of the vLLM server."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.script_arguments import given_argument, is_on
from zerofit.checking.rule import Hit, Rule, Severity, declared, fails, hit_of
from zerofit.checking.rules.script.hits import hit, least
from zerofit.core.command import Launcher
from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import ScriptCall, ScriptFacts

_SOURCE = "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_config.py"
_GENERATIONS = {"GRPO": 8, "RLOO": 2}
"""Defaults of num_generations (trl 1.16, trl/trainer/grpo_config.py and rloo_config.py)."""
_DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": None,
    "generation_batch_size": None,
    "num_generations_eval": None,
    "eval_strategy": "no",
}
"""Of the same files, and of transformers/training_args.py."""
_CONFIG = re.compile(r"(?:\w+\.)*(GRPO|RLOO)Config\(")
_TRAINER = re.compile(r"(?:\w+\.)*(GRPO|RLOO)Trainer\(")
_FORMER = {"rloo_k", "num_sample_generations", "**"}
"""Arguments of the RLOOConfig before trl 0.22, which counts otherwise; and unknown ones."""


@Rule(
    id="generation-batch-holds-whole-groups",
    severity=Severity.ERROR,
    summary="TRL's generation batch must be a multiple of num_generations",
    why="advantages compare all generations of a prompt, so TRL refuses a batch with a part of them",
    fix="change num_generations, the batch size or the accumulation steps, so that it divides their product",
    see=_SOURCE,
    evidence=fails("must be divisible by num_generations"),
)
def _breaks_groups(situation: Situation) -> Iterator[Hit]:
    script, ranks = situation.script, _world_size(situation)
    found = _settings(situation, script) if script is not None and ranks is not None else None
    alone = found[1]["num_generations"] if found is not None else _of_line(situation)
    if alone is not None and alone.value in (1, "1"):
        why = "an advantage compares the generations of a prompt, so TRL refuses one alone"
        yield hit_of(alone, why=why, fix="set num_generations to 2 or more")
    if found is None or ranks is None:
        return
    call, settings = found
    for size, texts, group in (_training(settings, ranks), _evaluation(settings, ranks)):
        if size is None or group is None or not isinstance(group.value, int) or group.value < 1:
            continue
        if size % group.value:
            confidence = least(group.confidence, *(text.confidence for text in texts))
            factors = ", ".join(dict.fromkeys(text.text for text in texts))
            on = f"{ranks} rank{'s' * (ranks > 1)}"
            place = group.place or call.seen.place
            text = f"{group.text} with {factors} on {on}: {size} is no multiple of {group.value}"
            yield replace(hit(call.seen, confidence=confidence), found=text, place=place)


def _of_line(situation: Situation) -> Said[Any] | None:
    """Return num_generations of a recipe, or of a program whose config is not seen."""
    said = situation.arguments.find("num_generations") if situation.script is None else None
    return None if said is None else replace(said, confidence=Confidence.LIKELY)


def _world_size(situation: Situation) -> int | None:
    if situation.topology is not None:
        return situation.topology.world_size
    command = situation.command
    return 1 if command is not None and command.launcher is Launcher.PYTHON else None


def _settings(
    situation: Situation, script: ScriptFacts
) -> tuple[ScriptCall, Mapping[str, Said[Any] | None]] | None:
    """Return the call that makes the config or Trainer, and its fields; None if some may be elsewhere.

    A field that is given, but whose value the source does not show, is None.
    """
    made = script.find(Action.MAKE_ARGUMENTS)
    trainers = script.find(Action.MAKE_TRAINER)
    names = {*_DEFAULTS, "num_generations"}
    if len(made) == 1 and (match := _CONFIG.match(made[0].seen.text)):
        (call,) = made
        if call.given & _FORMER:
            return None
        sure = Confidence.LIKELY if call.is_conditional or call.loop else Confidence.CERTAIN
        said = {keyword.name: keyword.said for keyword in script.training_arguments}
        given = call.given
    elif not made and len(trainers) == 1 and (match := _TRAINER.match(trainers[0].seen.text)):
        (call,) = trainers
        said = dict(situation.arguments.said)
        if not script.find(Action.PARSE_ARGUMENTS) or "config" in said:
            return None
        sure, given = Confidence.LIKELY, frozenset(said)
    else:
        return None
    defaults = {**_DEFAULTS, "num_generations": _GENERATIONS[match[1]]}
    return call, {name: _field(name, said, given, defaults[name], sure) for name in names}


def _field(
    name: str, said: Mapping[str, Said[Any]], given: frozenset[str], default: Any, confidence: Confidence
) -> Said[Any] | None:
    if name not in given:
        return Said(value=default, text=f"{name}={default} by default", confidence=confidence)
    found = said.get(name)
    if found is None or not isinstance(found.value, str) or not found.value.isdigit():
        return found
    return replace(found, value=int(found.value))


def _training(
    settings: Mapping[str, Said[Any] | None], ranks: int
) -> tuple[int | None, tuple[Said[Any], ...], Said[Any] | None]:
    """Return the generation batch, its factors, and the generations of a prompt."""
    group = settings["num_generations"]
    whole, steps = settings["generation_batch_size"], settings["steps_per_generation"]
    if whole is None or steps is None:
        return None, (), None
    if whole.value is not None:
        is_number = type(whole.value) is int and steps.value is None
        return (whole.value, (whole,), group) if is_number else (None, (), None)
    size = settings["per_device_train_batch_size"]
    factor = settings["gradient_accumulation_steps"] if steps.value is None else steps
    if size is None or factor is None or type(size.value) is not int or type(factor.value) is not int:
        return None, (), None
    return size.value * factor.value * ranks, (size, factor), group


def _evaluation(
    settings: Mapping[str, Said[Any] | None], ranks: int
) -> tuple[int | None, tuple[Said[Any], ...], Said[Any] | None]:
    """Return the batch of an evaluation on all ranks, its factor, and the generations of a prompt."""
    strategy, size = settings["eval_strategy"], settings["per_device_eval_batch_size"]
    own = settings["num_generations_eval"]
    group = own if own is None or own.value is not None else settings["num_generations"]
    if strategy is None or strategy.value not in ("steps", "epoch") or size is None or group is None:
        return None, (), None
    return (size.value * ranks if type(size.value) is int else None), (size, strategy), group


_SERVER = "vllm_mode"
_ELSEWHERE = ("vllm_server_host", "vllm_server_base_url")
_HERE = ("0.0.0.0", "127.0.0.1", "localhost")
_OWN_DEVICE = "vllm_device"
"""Of TRL before 0.16, which runs vLLM beside the first rank, on a GPU behind those of the ranks."""


@Rule(
    id="vllm-needs-a-gpu-of-its-own",
    severity=Severity.ERROR,
    summary="vLLM needs a GPU that no rank trains on",
    why="in server mode, and with vllm_device, vLLM generates on a GPU of its own beside the ranks",
    fix="start fewer ranks, or set vllm_mode to colocate",
    see="https://huggingface.co/docs/trl/vllm_integration",
    evidence=fails(not_reproduced="needs GPUs and vLLM"),
)
def _no_gpu_for_vllm(situation: Situation) -> Iterator[Hit]:
    ranks = situation.topology
    uses, mode = _of_config(situation, "use_vllm"), _of_config(situation, _SERVER)
    beside = _of_config(situation, _OWN_DEVICE) if mode is None else mode
    if ranks is None or uses is None or beside is None or not is_on(uses) or _is_elsewhere(situation):
        return
    if mode is not None and str(mode.value) != "server":
        return
    meant = _of_config(situation, "num_processes")  # open-r1's recipes say how many ranks leave one GPU free
    if meant is not None and type(meant.value) is int and meant.value < ranks.world_size:
        found = f"{ranks.world_size} ranks with {uses.text} and {meant.text}"
        yield hit_of(
            replace(meant, text=found, confidence=Confidence.LIKELY), fix=f"start {meant.value} ranks"
        )
        return
    gpus = _gpus_of_node(situation)
    if gpus is not None and ranks.ranks_per_node >= gpus.value:
        several = f"rank{'s' * (ranks.ranks_per_node > 1)} a node"
        found = f"{ranks.ranks_per_node} {several} with {uses.text} and {beside.text}, on {gpus.text}"
        fewer = ranks.ranks_per_node - 1
        fix = f"start {fewer} ranks a node, or set vllm_mode to colocate" if fewer else None
        yield Hit(found=found, place=uses.place, fix=fix, confidence=Confidence.LIKELY)


def _of_config(situation: Situation, name: str) -> Said[Any] | None:
    """Return an argument that the line, the recipe or the script's own config gives a value."""
    script = situation.script
    for keyword in script.training_arguments if script is not None else ():
        if keyword.name == name:
            return keyword.said
    return given_argument(situation, name)


def _is_elsewhere(situation: Situation) -> bool:
    """Return True if the server is on another machine, or may be."""
    hosts = (_of_config(situation, name) for name in _ELSEWHERE)
    return any(host is not None and not any(here in str(host.value) for here in _HERE) for host in hosts)


def _gpus_of_node(situation: Situation) -> Said[int] | None:
    """Return the GPUs of a node that are given by --gpus, or that the job asks Slurm for."""
    if situation.machine is not None and situation.machine.gpus:
        number = len(situation.machine.gpus)
        return Said(value=number, text=f"{number} GPU{'s' * (number > 1)}")
    job = situation.line.job if situation.line is not None else None
    found = job.gpus_per_node if job is not None else None
    return None if found is None else Said(value=found[0], text=f"#SBATCH {found[1].text}")


RULES = declared(vars())
