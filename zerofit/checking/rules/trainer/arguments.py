"""Rules on TrainingArguments: its fields, and values that Trainer compares with the DeepSpeed file."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import (
    launch_of_deepspeed,
    launch_value,
    named_deepspeed_file,
)
from zerofit.checking.rule import (
    ACCELERATE,
    DEEPSPEED,
    Hit,
    Rule,
    Severity,
    declared,
    fails,
    hit_at,
    hit_of,
    ignored,
)
from zerofit.checking.rules.deepspeed.early_reads import early_reads_of
from zerofit.checking.rules.deepspeed.values import MICRO, STEPS, TRAIN, corrected_paths
from zerofit.checking.rules.script.hits import hit
from zerofit.checking.situation import known
from zerofit.configs.document import SetValue, say, show
from zerofit.configs.schemas.releases import fix_for_release
from zerofit.core.command import Route, is_literal
from zerofit.core.errors import nearest
from zerofit.core.optimizers.lookup import trainer_names_of_types
from zerofit.core.setting import Confidence, Said
from zerofit.core.strategy import Engine
from zerofit.core.upstream.transformers import TRAINER_RENAMED
from zerofit.scripts.facts import TRAINING_ARGUMENTS, Action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from zerofit.checking.situation import Situation, TrainerSettings


_SOURCE = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers"
_INTEGRATION = f"{_SOURCE}/integrations/deepspeed.py"
_ARGUMENTS = f"{_SOURCE}/training_args.py"
_SIZES = (TRAIN, MICRO, STEPS)
_ONE_FIELD: Mapping[tuple[str, ...], str] = {
    (MICRO,): "per_device_train_batch_size",
    (STEPS,): STEPS,
    ("gradient_clipping",): "max_grad_norm",
    ("optimizer", "params", "lr"): "learning_rate",
    ("optimizer", "params", "eps"): "adam_epsilon",
    ("optimizer", "params", "weight_decay"): "weight_decay",
    ("scheduler", "params", "warmup_max_lr"): "learning_rate",
}
"""Keys of the DeepSpeed file that Trainer compares, and the field it compares with
(trainer_config_process)."""
_EITHER_FIELD: Mapping[tuple[str, ...], tuple[str, str]] = {
    ("fp16", "enabled"): ("fp16", "fp16_full_eval"),
    ("bf16", "enabled"): ("bf16", "bf16_full_eval"),
}
_HALVES = ("bf16", "fp16")
_BETAS = ("adam_beta1", "adam_beta2")
_OPTIMIZERS_ALIKE = trainer_names_of_types()
_SCHEDULERS_ALIKE = {
    "warmuplr": ("constant_with_warmup", "constant"),
    "warmupdecaylr": ("linear",),
    "warmupcosinelr": ("cosine",),
}
_EVALUATED_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules with which transformers sets metric_for_best_model to "loss", as load_best_model_at_end does."""
_RECOMPUTES = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
_TRAINER_CALL = re.compile(r"(\w+\.)*(Seq2Seq)?Trainer\(")


def _missing(field: str, key: str, default: float) -> Callable[[Situation], Iterator[Hit]]:
    """Return a predicate that finds a field whose key is missing in the file and so has its default."""

    def find(situation: Situation) -> Iterator[Hit]:
        said, file = situation.arguments.find(field), situation.deepspeed
        if said is None or file is None or file.at(key) is not None:
            return
        if isinstance(said.value, (int, float)) and said.value not in (default, False):
            is_read_first = key in _SIZES and any(early_reads_of(situation))
            edit = SetValue(document=file.name, path=(key,), value=said.value if is_read_first else "auto")
            fix = f"write {key}: {said.value} in the DeepSpeed file" if is_read_first else None
            hit = hit_of(said, f" with no {key} in {file.name}", edits=(edit,), fix=fix)
            yield replace(hit, place=said.place or file.place(file.root.span))

    return find


@Rule(
    id="trainer-values-differ",
    severity=Severity.ERROR,
    summary="Trainer refuses DeepSpeed settings that contradict its arguments",
    why='Trainer compares the values without conversion, 8 and "8" differ, and only fills in "auto"',
    fix='write "auto" in the DeepSpeed file, and the value in TrainingArguments',
    see=_INTEGRATION,
    evidence=fails("Please correct the following DeepSpeed config values that mismatch TrainingArguments"),
)
def _values_differ(situation: Situation) -> Iterator[Hit]:
    trainer, file = situation.arguments, situation.file
    ranks = None if situation.topology is None else situation.topology.world_size
    corrected = corrected_paths(situation)
    for path, names, said in (*_compared(trainer), *_global_batch(trainer, ranks)):
        if file.value(*path) in (None, "auto", said.value) or not _is_parsed(said.value):
            continue
        if path in corrected:
            continue
        is_said = any(trainer.find(name) is not None for name in names)
        fix = f'write {".".join(path)}: "auto"'
        if _is_quoted(file.value(*path), said.value):
            fix = f"write {show(said.value)} without quotes"
            edit = SetValue(document=file.name, path=path, value=said.value)
            yield hit_at(file, path, said.text, fix=fix, edits=(edit,), confidence=said.confidence)
            continue
        if path[0] in _SIZES and any(early_reads_of(situation)):
            yield hit_at(file, path, said.text, fix=_without_auto(path[0], names), confidence=said.confidence)
            continue
        yield hit_at(
            file,
            path,
            said.text,
            fix=fix if is_said else f"{fix}, and set {names[0]} to its value",
            edits=(SetValue(document=file.name, path=path, value="auto"),) if is_said else (),
            confidence=said.confidence,
        )
    yield from _launch_differs(situation)


def _without_auto(key: str, names: tuple[str, ...]) -> str:
    """Return the fix for a batch size that zero.Init() reads before Trainer would replace "auto"."""
    why = 'zero.Init() reads the file first, and takes "auto" as text'
    return f"leave {key} out: {why}" if key == TRAIN else f"set {names[0]} to its value: {why}"


def _launch_differs(situation: Situation) -> Iterator[Hit]:
    """Find settings of `accelerate launch` that its DeepSpeed plugin takes over, if no file replaces it."""
    launch, _ = launch_of_deepspeed(situation) or (None, None)
    trainer = situation.arguments
    if launch is None or situation.deepspeed is not None or named_deepspeed_file(launch) is not None:
        return
    if trainer.find("deepspeed") is not None or "deepspeed" in trainer.unread:
        return
    for key, name in ((STEPS, STEPS), ("gradient_clipping", "max_grad_norm")):
        said, field = launch_value(launch, key), trainer.find_or_default(name)
        number = _number(said.value) if said else None
        # The plugin leaves a clipping of 0 out.
        if said and field and number and _number(field.value) not in (None, number):
            yield _hit_against(said, field, f"give {name} and the launcher the same value")
    said = launch_value(launch, "mixed_precision")
    if said is None or said.value not in _HALVES:
        return
    # Trainer's own precision replaces the launcher's.
    fields = [trainer.find_or_default(name) for name in (said.value, *_HALVES, f"{said.value}_full_eval")]
    if fields[0] is not None and all(setting is not None and setting.value is False for setting in fields):
        yield _hit_against(said, fields[0], f"set {said.value} to true in TrainingArguments")


def _number(value: Any) -> float | None:
    """Return a number, or a flag's text, as a number; None if it is none."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _hit_against(said: Said[Any], field: Said[Any], fix: str) -> Hit:
    """Return the hit for a launcher's setting that contradicts a field of Trainer's."""
    why = "the launcher's value becomes DeepSpeed's, and Trainer compares it with its own"
    found = f"{said.text} with {field.text}"
    return replace(hit_of(field, fix=fix, why=why), found=found, place=said.place or field.place)


def _compared(trainer: TrainerSettings) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Said[Any]]]:
    """Yield each key of the DeepSpeed file that Trainer compares, its fields, and their value."""
    searches = trainer.find_or_default("auto_find_batch_size")
    for path, name in _ONE_FIELD.items():
        said = trainer.find_or_default(name)
        if said is not None and not (path == (MICRO,) and searches is not None and searches.value):
            yield path, (name,), said
    for path, names in _EITHER_FIELD.items():
        both = [trainer.find_or_default(name) for name in names]
        said = next((setting for setting in both if setting is not None and setting.value is True), both[0])
        other = trainer.find(_HALVES[_HALVES.index(names[0]) - 1])
        if said is None and other is not None and other.value is True:
            said = replace(other, value=False)  # Trainer takes one half precision
            names = (_HALVES[_HALVES.index(names[0]) - 1], names[1])
        if said is not None and isinstance(said.value, bool):
            yield path, names, said
    first, second = (trainer.find_or_default(name) for name in _BETAS)
    if first is not None and second is not None:
        text, values = f"{first.text} and {second.text}", [first.value, second.value]
        both_betas = replace(first, value=values, text=text)
        yield ("optimizer", "params", "betas"), _BETAS, both_betas
    warmup = trainer.find_or_default("warmup_steps")
    if warmup is not None and isinstance(warmup.value, (int, float)) and not 0 < warmup.value < 1:
        steps = replace(warmup, value=max(1, int(warmup.value)))
        yield ("scheduler", "params", "warmup_num_steps"), ("warmup_steps",), steps


def _global_batch(
    trainer: TrainerSettings, ranks: int | None
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Said[Any]]]:
    """Yield the global batch size that Trainer compares, if all of its factors are known."""
    searches = trainer.find_or_default("auto_find_batch_size")
    size, steps = (trainer.find_or_default(name) for name in ("per_device_train_batch_size", STEPS))
    if ranks is None or size is None or steps is None or (searches is not None and searches.value):
        return
    if type(size.value) is int and type(steps.value) is int:
        text = f"{size.text}, {steps.text} and {ranks} rank{'s' * (ranks > 1)}"
        product = replace(size, value=size.value * steps.value * ranks, text=text)
        yield ("train_batch_size",), ("per_device_train_batch_size", STEPS), product


def _is_quoted(text: Any, value: Any) -> bool:
    """Return True for a boolean that the file has as text: "true" for true."""
    return isinstance(text, str) and isinstance(value, bool) and text.strip().lower() == str(value).lower()


def _is_parsed(value: Any) -> bool:
    """Return True if a value is a number or boolean rather than a string such as $RATE."""
    return not any(isinstance(entry, str) for entry in (value if isinstance(value, list) else [value]))


_TRAINER_ACCUMULATION_NOT_IN_FILE = Rule(
    id="trainer-accumulation-not-in-file",
    severity=Severity.ERROR,
    summary="DeepSpeed ignores the accumulation steps of TrainingArguments",
    why="a DeepSpeed file without gradient_accumulation_steps means 1, without a warning",
    fix='write gradient_accumulation_steps: "auto" in the DeepSpeed file',
    see=f"{ACCELERATE}/utils/dataclasses.py",
    find=_missing(STEPS, STEPS, 1),
    evidence=ignored((STEPS, 1)),
)


_TRAINER_CLIPPING_NOT_IN_FILE = Rule(
    id="trainer-clipping-not-in-file",
    severity=Severity.WARNING,
    summary="DeepSpeed does not clip at max_grad_norm",
    why="a DeepSpeed file without gradient_clipping means 1.0, and clipping is done by the engine, not by "
    "Trainer",
    fix='write gradient_clipping: "auto" in the DeepSpeed file',
    see="https://github.com/deepspeedai/DeepSpeed/blob/master/deepspeed/runtime/constants.py",
    find=_missing("max_grad_norm", "gradient_clipping", 1.0),
    evidence=ignored(("gradient_clipping", 1.0)),
)


@Rule(
    id="trainer-argument-overridden",
    severity=Severity.WARNING,
    summary="the DeepSpeed file's optimizer and scheduler replace those of TrainingArguments",
    why="if the file has the section, Trainer silently does not create its own",
    fix="keep one of the two",
    see=_INTEGRATION,
    evidence=ignored(("optimizer", "FusedAdam")),
)
def _overridden(situation: Situation) -> Iterator[Hit]:
    file = situation.file
    pairs = (("optim", "optimizer", _OPTIMIZERS_ALIKE), ("lr_scheduler_type", "scheduler", _SCHEDULERS_ALIKE))
    for name, section, alike in pairs:
        said, kind = situation.arguments.find(name), file.value(section, "type")
        if said is None or file.at(section) is None or said.value in alike.get(str(kind).lower(), ()):
            continue
        if isinstance(said.value, str) and is_literal(said.value):
            found = f"{said.text} with {say(file, section, 'type')}"
            fix = f"remove {section} from {file.name}, or leave {name} out"
            yield hit_at(file, (section,), found=found, fix=fix, confidence=said.confidence)


@Rule(
    id="activation-checkpointing-unread",
    severity=Severity.WARNING,
    summary="Trainer does not read DeepSpeed's section activation_checkpointing",
    why="only deepspeed.checkpointing reads it, and the models of transformers call torch's",
    fix="remove it; gradient_checkpointing in TrainingArguments recomputes activations",
    see=f"{DEEPSPEED}/runtime/activation_checkpointing/checkpointing.py",
    evidence=ignored(not_reproduced="the harness does not observe deepspeed.checkpointing"),
)
def _unread_checkpointing(situation: Situation) -> Iterator[Hit]:
    document, section = situation.file, "activation_checkpointing"
    asked = [say(document, section, key) for key in _RECOMPUTES if document.value(section, key) is True]
    if asked and known(situation.route, "the library that reads it") is Route.TRAINER:
        yield hit_at(document, (section,), found=" with ".join(asked), confidence=Confidence.LIKELY)


@Rule(
    id="best-model-needs-checkpoints",
    severity=Severity.ERROR,
    summary="load_best_model_at_end needs whole checkpoints, each with an evaluation",
    why="only a checkpoint that was evaluated can be the best, so transformers refuses other settings",
    fix="set save_strategy and eval_strategy to the same value",
    see=_ARGUMENTS,
    evidence=fails("load_best_model_at_end requires the save and eval strategy to match"),
)
def _best_not_saved(situation: Situation) -> Iterator[Hit]:
    trainer = situation.arguments
    best = trainer.find("load_best_model_at_end")
    if best is None or best.value is not True:
        return
    alone = trainer.find("save_only_model")
    engine = situation.settings.engine
    if alone is not None and alone.value is True and engine and engine.value is Engine.DEEPSPEED:
        why = "DeepSpeed loads its own checkpoint, which save_only_model leaves out"
        yield hit_of(best, f" with {alone.text}", why=why, fix="leave save_only_model out")
    save, evaluation = (trainer.find_or_default(f"{name}_strategy") for name in ("save", "eval"))
    if save is None or evaluation is None or not _is_word(save.value) or not _is_word(evaluation.value):
        return
    if save.value == "best" or _has_former_name(trainer):
        return
    if save.value != evaluation.value:
        yield _best_with(best, evaluation, save)
        return
    every, steps = (trainer.find_or_default(name) for name in ("eval_steps", "save_steps"))
    if every is not None and every.value is None:
        every = trainer.find_or_default("logging_steps")
    if save.value != "steps" or every is None or steps is None:
        return
    period, between = _number(every.value), _number(steps.value)
    if period is not None and between is not None and min(period, between) >= 1 and between % period:
        yield replace(_best_with(best, every, steps), fix="set save_steps to a multiple of eval_steps")


def _is_word(value: Any) -> bool:
    """Return True if a value is a literal text."""
    return isinstance(value, str) and is_literal(value)


def _has_former_name(trainer: TrainerSettings) -> bool:
    """Return True if eval_strategy has its name of transformers 4, which has a rule of its own."""
    former = "evaluation_strategy"
    return trainer.find(former) is not None or any(said.value == former for said in trainer.surplus)


def _best_with(best: Said[Any], *fields: Said[Any]) -> Hit:
    """Return the hit for load_best_model_at_end with these fields, at most as certain as each of them."""
    is_likely = any(field.confidence is not Confidence.CERTAIN for field in fields)
    found = hit_of(best, f" with {' and '.join(field.text for field in fields)}")
    return replace(found, confidence=Confidence.LIKELY) if is_likely else found


@Rule(
    id="evaluation-needs-dataset",
    severity=Severity.ERROR,
    summary="a Trainer that evaluates during training needs an eval_dataset",
    why="eval_strategy asks for evaluations, and transformers refuses a Trainer without data for them",
    fix="pass eval_dataset to Trainer, or leave eval_strategy out",
    see=f"{_SOURCE}/trainer.py",
    evidence=fails("but you didn't pass an `eval_dataset` to `Trainer`"),
)
def _nothing_to_evaluate_on(situation: Situation) -> Iterator[Hit]:
    script, evaluation = situation.script, situation.arguments.find("eval_strategy")
    if script is None or evaluation is None or evaluation.value not in ("steps", "epoch"):
        return
    if len(script.find(Action.MAKE_ARGUMENTS)) > 1:
        return  # each may be another Trainer's
    for call in script.find(Action.MAKE_TRAINER):
        # Of a class of the script no keywords are known, and not what it adds to them.
        is_open = "train_dataset" not in call.given or call.given & {"eval_dataset", "**"}
        if not is_open and not call.is_conditional and _TRAINER_CALL.match(call.seen.text):
            behind = f" without eval_dataset, with {evaluation.text}"
            yield hit(call.seen, behind, evaluation.confidence)


@Rule(
    id="early-stopping-needs-metric",
    severity=Severity.ERROR,
    summary="EarlyStoppingCallback needs evaluations, and a metric to compare",
    why="it compares metric_for_best_model after each evaluation, and asserts that there will be both",
    fix="set eval_strategy, and metric_for_best_model or load_best_model_at_end",
    see=f"{_SOURCE}/trainer_callback.py",
    evidence=fails("EarlyStoppingCallback requires metric_for_best_model to be defined"),
)
def _stops_by_no_metric(situation: Situation) -> Iterator[Hit]:
    lacking = _lacks_for_stopping(situation.arguments)
    for call in situation.script.find(Action.STOP_EARLY) if situation.script and lacking else ():
        if not call.is_conditional:
            yield hit(call.seen, f" with {lacking}")


def _lacks_for_stopping(trainer: TrainerSettings) -> str | None:
    """Return what early stopping lacks, as a finding says it; None if nothing certainly."""
    names = ("eval_strategy", "metric_for_best_model", "load_best_model_at_end", "lr_scheduler_type")
    evaluation, metric, best, schedule = map(trainer.find_or_default, names)
    if _has_former_name(trainer):
        return None
    if evaluation is not None and evaluation.value == "no":
        return evaluation.text
    if metric is None or metric.value is not None or best is None or best.value is not False:
        return None
    sets_metric = schedule is None or not _is_word(schedule.value) or schedule.value in _EVALUATED_SCHEDULES
    return None if sets_metric else f"{metric.text} and {best.text}"


@Rule(
    id="trainer-takes-one-half-precision",
    severity=Severity.ERROR,
    summary="TrainingArguments accept only one of bf16 and fp16",
    why="a run has one precision for forward and backward",
    fix="keep bf16, or fp16 on GPUs before Ampere",
    see=_ARGUMENTS,
    evidence=fails("At most one of fp16 and bf16 can be True"),
)
def _both_halves(situation: Situation) -> Iterator[Hit]:
    for suffix in ("", "_full_eval"):
        bf16, fp16 = (situation.arguments.find(f"{name}{suffix}") for name in ("bf16", "fp16"))
        if bf16 and fp16 and bf16.value is True and fp16.value is True:
            yield hit_of(bf16, f" with {fp16.text}")


@Rule(
    id="training-argument-unknown",
    severity=Severity.ERROR,
    summary="TrainingArguments or Trainer has no such argument",
    why="transformers refuses unknown and removed arguments",
    fix="remove it",
    see=_ARGUMENTS,
    evidence=fails("evaluation_strategy"),
    holds_for=("transformers>=5",),
)
def _unknown_fields(situation: Situation) -> Iterator[Hit]:
    trainer = situation.trainer
    if trainer is None:
        return
    schema = known(situation.schemas, "the fields of TrainingArguments").training_arguments
    gone = {other.path[0]: fix_for_release(schema, *other.path) for other in schema.other_releases}
    gone |= {former.path[0]: former.fix for former in schema.removed}
    names = [key.name for key in schema.root.keys]
    for said in trainer.surplus:
        near = nearest(said.value, names)
        instead = gone.get(said.value, f"write {near}" if near else None)
        yield hit_of(said, fix=instead)
    for name, argument in trainer.said.items():
        parsed = situation.script.parsed_fields if situation.script else None
        if name in gone:  # on a command line, another class of the script may use it
            is_certain = parsed is not None and TRAINING_ARGUMENTS in parsed and name not in parsed
            confidence = argument.confidence if is_certain else Confidence.LIKELY
            yield replace(hit_of(argument, fix=gone[name]), confidence=confidence)
    for call in situation.script.find(Action.MAKE_TRAINER) if situation.script else ():
        for name, renamed in TRAINER_RENAMED.items():
            if name in call.given and _TRAINER_CALL.match(call.seen.text):
                found = f"{name}=... in {call.seen.text}"
                yield replace(hit(call.seen), found=found, fix=f"write {renamed}={name}")


@Rule(
    id="trainer-unknown-optimizer",
    severity=Severity.ERROR,
    summary="Trainer has no optimizer of this name",
    why="optim only accepts the names in transformers' OptimizerNames",
    fix="set optim to a name that Trainer knows",
    see=_ARGUMENTS,
    evidence=fails("adamw_hf"),
    holds_for=("transformers>=5",),
)
def _unknown_optimizer(situation: Situation) -> Iterator[Hit]:
    said = situation.arguments.find("optim")
    if said is None or not isinstance(said.value, str) or not is_literal(said.value):
        return
    key = known(situation.schemas, "the optimizers of Trainer").training_arguments.find("optim")
    choices = [str(choice) for choice in key.choices] if key else []
    if said.value not in choices:
        near = nearest(said.value, choices)
        yield hit_of(said, fix=f"write {near}" if near else None)


RULES = declared(vars())
