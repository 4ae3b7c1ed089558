"""Rules on FSDP in TrainingArguments: fsdp, fsdp_config, and what Trainer refuses beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.fsdp_run import FSDP_SECTION, FsdpSource, truth_of, turns_on
from zerofit.checking.rule import HANGS, Rule, Severity, declared, fails, hit_of, ignored
from zerofit.checking.rules.fsdp.settings import under_fsdp
from zerofit.checking.rules.script.hits import hit, hit_under_condition, least, unguarded_calls
from zerofit.checking.situation import known
from zerofit.core.command import Launcher, Route, is_literal
from zerofit.core.errors import nearest
from zerofit.core.setting import Confidence
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.inputs.fsdp_run import FsdpRun
    from zerofit.checking.rule import Hit
    from zerofit.checking.situation import Situation
    from zerofit.core.setting import Said

_SOURCE = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers"
_ARGUMENTS, _TRAINER = f"{_SOURCE}/training_args.py", f"{_SOURCE}/trainer.py"
_SINCE_FSDP2 = ("transformers>=5.10",)
"""The first release whose TrainingArguments read fsdp_config alone, for version 2 by default."""
_MEANT = {
    "offload_params": "cpu_offload",
    "sharding_strategy": "reshard_after_forward",
    "use_fsdp": "version",
    "backward_prefetch_policy": "backward_prefetch",
}
"""accelerate's names of settings, and the key of fsdp_config that does the same."""
_NAMED_IN_1 = ("no_shard", "hybrid_shard", "hybrid_shard_zero2")
_WORDS = ("full_shard", "shard_grad_op", *_NAMED_IN_1, "offload", "auto_wrap")
"""Words of `fsdp`: accelerate's strategies in lower case, and two of FSDPOption."""
_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")


@Rule(
    id="fsdp-config-without-fsdp",
    severity=Severity.WARNING,
    summary="fsdp_config has no effect without fsdp",
    why="TrainingArguments read it only if fsdp is set, so that the model is not sharded as it says",
    fix="write fsdp=True",
    see=_ARGUMENTS,
    evidence=ignored(("fsdp_version", "not observed")),
)
def _config_alone(situation: Situation) -> Iterator[Hit]:
    trainer = situation.arguments
    config = trainer.find(FSDP_SECTION) or next(iter((trainer.fsdp_config or {}).values()), None)
    switch = trainer.find("fsdp")
    if config is None or config.value in (None, "", {}) or "fsdp" in trainer.unread:
        return
    is_off = switch is None or not turns_on(switch)
    if is_off and (switch is not None or trainer.unread == frozenset() or trainer.is_complete):
        yield hit_of(config, f" with {switch.text}" if switch else " without fsdp")


@Rule(
    id="fsdp-config-key-unknown",
    severity=Severity.WARNING,
    summary="TrainingArguments ignore a key of fsdp_config",
    why="they read the keys that they know, and say nothing about others",
    fix="remove the key",
    see=_ARGUMENTS,
    holds_for=_SINCE_FSDP2,
    evidence=ignored(("reshards_after_forward", True)),
)
@under_fsdp(FsdpSource.TRAINER)
def _unknown_keys(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    fields = known(situation.schemas, "the fields of TrainingArguments").training_arguments.root
    key = fields.find(FSDP_SECTION)
    keys = [key.name for key in key.section.keys] if key and key.section else []
    for name, said in fsdp.said.items():
        top = name.partition(".")[0]
        if not keys or top in keys or said.value in (None, ""):
            continue
        near = _MEANT.get(top) or nearest(top, keys)
        is_harmless = top == "offload_params" and truth_of(said.value) is False
        if not is_harmless:
            yield hit_of(said, fix=f"write {near}" if near else None)


@Rule(
    id="fsdp-word-refused",
    severity=Severity.ERROR,
    summary="TrainingArguments refuse a word of fsdp",
    why="each word, between spaces, is a sharding strategy of FSDP 1, offload or auto_wrap; FSDP 2, the "
    "default, has full_shard and shard_grad_op alone",
    fix="write fsdp=True, and the rest in fsdp_config",
    see=_ARGUMENTS,
    holds_for=_SINCE_FSDP2,
    evidence=fails("Unknown `fsdp` option: full_shard,auto_wrap"),
)
def _refused_words(situation: Situation) -> Iterator[Hit]:
    uses = situation.arguments.find("fsdp")
    if uses is None or uses.value is None or truth_of(uses.value) is not None:
        return
    words = uses.value.split() if isinstance(uses.value, str) else uses.value
    config = situation.arguments.fsdp_config or {}
    given = config.get("version") or config.get("fsdp_version")
    is_open = situation.arguments.fsdp_config is None and _is_config_open(situation)
    for word in words if isinstance(words, (list, tuple)) else ():
        is_first = is_open or (given is not None and str(given.value) == "1")
        if is_literal(str(word)) and (word not in _WORDS or (word in _NAMED_IN_1 and not is_first)):
            yield _refused_word(uses, str(word))


def _refused_word(uses: Said[Any], word: str) -> Hit:
    if word in _NAMED_IN_1:
        return hit_of(uses, f", and {word} is of FSDP 1")
    near = nearest(word.lower(), _WORDS)
    fix = f"write {near}" if near is not None and near not in (*_NAMED_IN_1, word) else None
    return hit_of(uses, f", where {word!r} is none", fix=fix)


def _is_config_open(situation: Situation) -> bool:
    """Return True if fsdp_config may be given, in a file or by the script."""
    trainer = situation.arguments
    return trainer.find(FSDP_SECTION) is not None or FSDP_SECTION in trainer.unread


@Rule(
    id="fsdp-excludes-deepspeed",
    severity=Severity.ERROR,
    summary="Trainer takes fsdp or deepspeed, not both",
    why="each of them shards the model by itself",
    fix="leave one of them out",
    see=_TRAINER,
    evidence=fails("Using --fsdp xxx together with --deepspeed is not possible"),
)
@under_fsdp(FsdpSource.TRAINER)
def _with_deepspeed(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said = situation.arguments.find("deepspeed")
    if said is not None and said.value:
        yield hit_of(fsdp.uses, f" with {said.text}")


@Rule(
    id="fsdp-needs-ranks",
    severity=Severity.ERROR,
    summary="Trainer's fsdp needs a launcher",
    why="a script started by python alone is one process, and Trainer refuses to shard over it",
    fix="start it with accelerate launch or torchrun",
    see=_TRAINER,
    evidence=fails("Using fsdp only works in distributed training"),
)
@under_fsdp(FsdpSource.TRAINER)
def _one_process(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    command = situation.command
    if command is not None and command.launcher is Launcher.PYTHON and command.runner is None:
        yield hit_of(fsdp.uses, f" with {command.program or 'python'}")


@Rule(
    id="fsdp-checkpoints-twice",
    severity=Severity.ERROR,
    summary="activations are checkpointed by FSDP or by the model, not by both",
    why="Trainer refuses the two together: blocks would be recomputed twice",
    fix="leave gradient_checkpointing out, and keep activation_checkpointing of FSDP",
    see=_TRAINER,
    evidence=fails("training argument can't both be set to True"),
)
@under_fsdp()
def _checkpoints_twice(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said = fsdp.find("activation_checkpointing")
    own = next(filter(None, map(situation.arguments.find, _CHECKPOINTING)), None)
    if situation.route is not Route.TRAINER or said is None or own is None:
        return
    if own.value is True and truth_of(said.value) is True:
        both = replace(own, confidence=least(own.confidence, said.confidence))
        yield hit_of(both, f" with {said.text}")


@Rule(
    id="fsdp-sharded-save-only-model",
    severity=Severity.ERROR,
    summary="save_only_model needs whole weights",
    why="under SHARDED_STATE_DICT Trainer has no whole model to save, and refuses the two together",
    fix="write state_dict_type FULL_STATE_DICT, or leave save_only_model out",
    see=_TRAINER,
    evidence=fails("save_only_model option is not compatible with FSDP state dict type"),
)
@under_fsdp()
def _only_sharded(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    kind, only = fsdp.state_dict_type, situation.arguments.find("save_only_model")
    if only is not None and only.value is True and kind is not None and kind.value == "SHARDED_STATE_DICT":
        yield hit_of(only, f" with {kind.text}")


@Rule(
    id="fsdp-best-model-needs-states",
    severity=Severity.ERROR,
    summary="load_best_model_at_end needs whole checkpoints under FSDP",
    why="save_only_model leaves no checkpoint that a sharded model can load, and Trainer refuses the two",
    fix="leave save_only_model out, or load_best_model_at_end",
    see=_TRAINER,
    evidence=fails("FSDP can't be used with `save_only_model` along with `load_best_model_at_end`"),
)
@under_fsdp()
def _best_of_models(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    only, best = map(situation.arguments.find, ("save_only_model", "load_best_model_at_end"))
    kind = fsdp.state_dict_type
    if only is None or best is None or only.value is not True or best.value is not True:
        return
    if kind is None or kind.value != "SHARDED_STATE_DICT":
        yield hit_of(only, f" with {best.text}")


@Rule(
    id="fsdp-sharded-save-has-no-weights",
    severity=Severity.WARNING,
    summary="save_model() writes no weights under SHARDED_STATE_DICT",
    why="Trainer gathers the model only under FULL_STATE_DICT; else it silently writes no model.safetensors",
    fix="write state_dict_type: FULL_STATE_DICT, or call trainer.accelerator.state.fsdp_plugin"
    '.set_state_dict_type("FULL_STATE_DICT") before it',
    see=_TRAINER,
    evidence=ignored(("left final", "not observed")),
)
@under_fsdp()
def _saves_nothing(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    script, kind = situation.script, fsdp.state_dict_type
    if situation.route is not Route.TRAINER or script is None or kind is None:
        return
    if script.find(Action.GATHER_SHARDS):
        return  # it sets another type before it saves, or merges the shards afterwards
    if kind.value == "SHARDED_STATE_DICT" and script.route is Route.TRAINER:
        for call in unguarded_calls(situation, Action.SAVE_MODEL):
            yield hit(call.seen, f" with {kind.text}", Confidence.LIKELY)


@Rule(
    id="fsdp-trainer-makes-optimizer",
    severity=Severity.ERROR,
    summary="under FSDP Trainer must create the optimizer itself",
    why="one that is passed holds the whole parameters, which sharding replaces",
    fix="leave optimizers out, and override create_optimizer() of a subclass, or set optim",
    see=_TRAINER,
    evidence=fails("Passing `optimizers` is not allowed if PyTorch FSDP is enabled"),
)
@under_fsdp()
def _passes_optimizer(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.MAKE_TRAINER):
        keyword = call.keyword("optimizers")
        if "optimizers" in call.given and (keyword is None or keyword.value not in (None, (None, None))):
            yield hit(call.seen, " with FSDP")


@Rule(
    id="fsdp-save-model-needs-all-ranks",
    severity=Severity.ERROR,
    summary="Trainer's save_model() gathers the model from every rank",
    why="a rank that saves alone waits for the shards of the others, which never send them",
    fix="move it out of the condition: Trainer writes on the main rank only",
    see=_TRAINER,
    evidence=HANGS,
)
@under_fsdp()
def _saves_alone(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    script, kind = situation.script, fsdp.state_dict_type
    if script is None or script.route is not Route.TRAINER or (kind and kind.value != "FULL_STATE_DICT"):
        return
    for call in unguarded_calls(situation, Action.SAVE_MODEL):
        if call.one_rank is not None:
            yield hit_under_condition(call)


RULES = declared(vars())
