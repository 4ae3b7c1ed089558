"""ScriptFacts: facts from a training script's source, without running it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from zerofit.core.setting import Confidence, Place, Said

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerofit.core.command import Route

Plain: TypeAlias = str | int | float | bool | tuple["Plain", ...] | None
"""A literal's value; lists are tuples here."""

TRAINING_ARGUMENTS = "TrainingArguments"
"""Stands for all fields of transformers' class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A piece of source code."""

    text: str
    """The source text on one line, truncated if long."""
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyword:
    """A keyword argument with a literal value, or a name with a known literal value."""

    name: str
    value: Plain
    text: str
    """As written: "gradient_accumulation_steps=4"."""
    place: Place
    confidence: Confidence = Confidence.LIKELY
    """CERTAIN for a literal in a call that each run makes, or if the script was run and confirmed it."""

    @property
    def said(self) -> Said[Any]:
        """The value as a setting of the run."""
        return Said(value=self.value, text=self.text, place=self.place, confidence=self.confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedOptimizer:
    """An optimizer created by the script."""

    id: str
    """Its id in core/optimizers/table.py, or "other:" and its dotted name."""
    text: str
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An optimizer or a scheduler that prepare() gets."""

    made: Snippet
    is_scheduler: bool
    is_dummy: bool
    """True for accelerate's DummyOptim and DummyScheduler, placeholders for a section of DeepSpeed's file."""
    is_certain: bool
    """True if each run that makes the call passes it, and the script leaves DeepSpeed's file alone."""
    given: frozenset[str] = frozenset()
    """Names of the arguments that it is made with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOption:
    """An option of from_pretrained() whose value is that of a parsed argument, or is computed."""

    argument: str | None
    """The argument's destination; None if the script itself computes a value that is not None."""
    is_replaced: bool = False
    """True if the script may give it another value first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """What makes bitsandbytes quantize a model."""

    made: Snippet
    """The BitsAndBytesConfig(), the dictionary in its place, or the function that returns one."""
    arguments: frozenset[str] = frozenset()
    """Parsed arguments of which one has to be given for it; empty if each run quantizes the model."""


class ScheduleFault(StrEnum):
    """How the steps that a prepared scheduler is made for differ from those of all ranks together."""

    OF_ONE_RANK = "the length of a prepared DataLoader"
    OF_THE_LOOP = "the steps of each rank's loop"
    OF_MICRO_BATCHES = "the steps of each rank's loop, times those of accumulation"
    PER_EPOCH = "a step for each epoch"
    DIVIDED = "divided by the ranks, though the DataLoader was not prepared"
    MULTIPLIED = "multiplied by the ranks, though the DataLoader was not prepared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A prepared scheduler that is made for another number of steps than it takes."""

    made: Snippet
    steps: str
    """The expression for its number of steps."""
    fault: ScheduleFault
    argument: str | None
    """The parsed argument that has to be given for it; None if each run makes it so."""
    kind_argument: str | None = None
    """The parsed argument that names the kind of schedule; None if none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model created by the script."""

    made: Snippet
    source: ModelConstructor
    keywords: tuple[Keyword, ...]
    is_trained: bool
    """True if it is passed to prepare(), a Trainer or deepspeed.initialize()."""
    is_in_zero_init: bool
    """True if it is created inside `deepspeed.zero.Init()`."""
    later_setup: Snippet | None
    """The first Accelerator(), TrainingArguments() or HfDeepSpeedConfig(), if it comes after the model."""
    is_before_setup: bool
    """True if nothing that reads the DeepSpeed configuration was created before the model."""
    is_always_after_setup: bool = False
    """True if each run makes it, behind an Accelerator() or TrainingArguments() that each run makes."""
    device_map: ModelOption | None = None
    """What gives its device_map, beside `keywords`; None if nothing does, or the script handles DeepSpeed."""
    quantization: Quantization | None = None
    bf16_weights: Snippet | None = None
    """The call that makes its weights bf16; None if none does, or if they may be cast later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A configuration that a script reads itself: a file, or a dictionary in its source."""

    name: str | None = None
    """A literal."""
    literal: str | None = None
    """A dictionary of literals, as JSON with each key in its line of the script."""
    argument: str | None = None
    """The parsed argument with the name, such as "deepspeed" of `args.deepspeed`, or another expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyRead:
    """A DeepSpeed file that zero.Init() reads before Trainer or accelerate have filled all of it in."""

    reader: Snippet
    """HfDeepSpeedConfig(...), zero.Init(...) or Accelerator(...)."""
    at: Snippet
    """When it is read: the from_pretrained() that follows, or zero.Init() itself."""
    file: ConfigFile | None
    """None if unknown, if the script changes the content first, or if the launcher names it."""
    is_by_accelerate: bool = False
    """True if Accelerator() read the file, and put 1 in place of sizes that only prepare() knows."""
    knows_ranks: bool
    """True if DeepSpeed's communication is set up before, or may be; otherwise it counts one rank."""
    is_dropped: bool = False
    """True if the HfDeepSpeedConfig is no longer alive: nothing is read, and the model is not partitioned."""
    confidence: Confidence = Confidence.CERTAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptArgument:
    """An option of the script's own parser, whose value follows from the command line."""

    dest: str
    options: tuple[str, ...]
    """As added: ("-s", "--save")."""
    number: type[int] | type[float] | None = None
    """What its text is converted to; None for text, and for a switch."""
    sets: bool | None
    """What a switch sets: True for store_true; None for an option with a text."""
    default: Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearedGradients:
    """Gradients of earlier micro-batches that a zero_grad() deletes before a step has used them."""

    backward: Snippet
    """The backward() of each micro-batch."""
    step: Snippet | None = None
    """The step() that comes once in several micro-batches; None inside accumulate(), where the Accelerator's
    number of steps decides."""
    every: Snippet | None = None
    """The condition of that step(); None for one behind a loop."""
    argument: str | None = None
    """The parsed argument that is the number of micro-batches between two steps; None if none, or known."""
    confidence: Confidence = Confidence.LIKELY


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCall:
    """A call that rules check. Calls in a function count where the function is called."""

    action: Action
    seen: Snippet
    state: ModelState | None = None
    """The state of the model; None if unknown, or without a model."""
    one_rank: Snippet | None = None
    """The condition under which only some ranks get here, such as `accelerator.is_main_process`."""
    first_rank: Snippet | None = None
    """MAKE_MODEL: the `with accelerator.main_process_first():` around it, which ranks pass one after the
    other."""
    is_otherwise: bool = False
    """True if they get here when that condition is false, as after `if not main: return`."""
    is_engine_checked: bool = False
    """True if it is under a condition on DeepSpeed, FSDP or the ZeRO stage, so the author handled these."""
    is_gathered: bool = False
    """True inside `GatheredParameters()`."""
    is_in_inference_mode: bool = False
    """True inside `torch.inference_mode()`."""
    share: Snippet | None = None
    """The expressions that decide how often each rank gets here, if ranks may differ: the loop's
    `prompts[rank::world_size]`, or a condition such as `number % world_size == rank`."""
    trains_before: bool = False
    """FORWARD, GENERATE, EVALUATE: True if the script has trained before it, or may have, including a Trainer
    that trains in the other branch of a condition."""
    trains_after: bool = False
    """FORWARD, GENERATE, EVALUATE: True if the script trains after it; MAKE_TRAINER: with this Trainer."""
    is_in_each_training: bool = False
    """EVALUATE: True if every training run of the script also makes it, whatever its conditions."""
    is_conditional: bool = False
    """True if it is under a condition, so some runs of the script may skip it."""
    is_in_each_run: bool = False
    """True if each run of the script makes it: under no condition, in no loop, in no uncalled function."""
    needs: frozenset[tuple[str, str, Plain]] = frozenset()
    """What its conditions say of parsed arguments: ("save", "", True) under `if args.save`, ("mode", "==",
    "eval"), ("out", "is None", False)."""
    every_few_steps: Snippet | None = None
    """The modulo condition inside its loop, such as `step % 4 == 0`."""
    loop: int | None = None
    """The line of the innermost loop."""
    keywords: tuple[Keyword, ...] = ()
    given: frozenset[str] = frozenset()
    """Names of all keyword arguments, literal or not; "**" if some are unpacked."""
    options: frozenset[str] = frozenset()
    """PARSE_STRICTLY: the parser's options; "**" if some are unknown."""
    is_compiled: bool = False
    """PREPARE: True if one of its models was compiled by torch.compile()."""
    num_models: int = 0
    """PREPARE: number of different models passed."""
    has_optimizer: bool = False
    """PREPARE, INITIALIZE: True if an optimizer, or something unknown, is passed."""
    prepared: tuple[Prepared, ...] = ()
    """PREPARE: the optimizers and schedulers passed, as far as known."""
    has_unknown: bool = False
    """PREPARE: True if something unknown is passed, or the script may change DeepSpeed's configuration."""
    has_own_optimizer: bool = False
    """INITIALIZE: True if its argument `optimizer` is given and not None, so DeepSpeed ignores the file's."""
    num_loaders: int | None = None
    """PREPARE: number of DataLoaders passed; None if something unknown is passed, which may be one, or if the
    script itself sets DeepSpeed's micro batch size."""
    iterator: Snippet | None = None
    """PREPARE: a generator over a DataLoader that is passed in its place."""
    without_section: Snippet | None = None
    """MAKE_DUMMY_SCHEDULER: the condition that holds when DeepSpeed's file has no scheduler."""
    unsized_loader: Snippet | None = None
    """PREPARE: a DataLoader passed that has no batch_size, but a batch_sampler or whole batches."""
    is_outside_engine: bool = False
    """FORWARD, GENERATE: True if the model was created by from_pretrained() or from_config() when
    transformers already knew the DeepSpeed configuration, and has not been passed to an engine so far."""
    new_tokens: Confidence | None = None
    """GATHER: how certain it is that the argument is generated tokens, unpadded, of a different length on
    each rank; None if it is not."""
    forwards: tuple[Snippet, ...] = ()
    """BACKWARD: forward passes of one engine, with gradients, since the last backward in the loop."""

    clears: ClearedGradients | None = None
    """ZERO_GRAD: what it deletes too early."""
    half_weights: Said[object] | None = None
    """PREPARE, MAKE_TRAINER, STEP_SCALED: what made all weights of the model that trains fp16, or does under
    fp16 mixed precision."""
    frozen_by: Snippet | None = None
    """PREPARE, INITIALIZE, MAKE_TRAINER: the call that loaded the model's adapters without
    is_trainable=True."""

    def keyword(self, name: str) -> Keyword | None:
        """Return the literal keyword argument of that name."""
        return next((keyword for keyword in self.keywords if keyword.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """The facts of one script."""

    name: str
    """The file, as the user named it."""
    route: Route | None
    """The library that reads the DeepSpeed configuration, judged by the script's calls; None if unknown."""
    optimizers: tuple[UsedOptimizer, ...] = ()
    accelerator_keywords: tuple[Keyword, ...] = ()
    """Keyword arguments of Accelerator(): literals, and those of a known command line; "plugin.num_steps" is
    one of GradientAccumulationPlugin(), "project.total_limit" one of ProjectConfiguration()."""
    accelerator_arguments: tuple[Keyword, ...] = ()
    """Keyword arguments of Accelerator() that are parsed arguments; the values are their destinations."""
    training_arguments: tuple[Keyword, ...] = ()
    """Literal keyword arguments of TrainingArguments() and of TRL's config classes."""
    parsed_training_arguments: tuple[Keyword, ...] = ()
    """Keyword arguments of the same that are parsed arguments; the values are their destinations."""
    parses_plain_arguments: bool = False
    """True if HfArgumentParser makes transformers' own TrainingArguments of the command line."""
    parsed_fields: frozenset[str] | None = None
    """The fields that a strict HfArgumentParser takes, where "TrainingArguments" stands for all of that
    class; None if not all are known."""
    calls: tuple[ScriptCall, ...] = ()
    """In execution order, as far as the source shows it."""
    models: tuple[Model, ...] = ()
    arguments: tuple[ScriptArgument, ...] = ()
    early_reads: tuple[EarlyRead, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    loads_states: bool = False
    """True if some run of the script calls Accelerator.load_state()."""
    sets_accumulation: bool = False
    """True if it sets the Accelerator's steps of accumulation after it is made."""
    variables: frozenset[str] = frozenset()
    """Environment variables that it may read: the literals in capitals in its source."""
    repeats_epochs: bool = False
    """True if it loops over epochs, and tells none of them to anything by set_epoch()."""

    def reached_with(self, given: Sequence[str]) -> ScriptFacts:
        """Return these facts without the calls that a run with some arguments certainly never makes."""
        # Launchers add numbers, such as --local_rank.
        texts = [argument for argument in self.arguments if argument.number is None]
        values = {argument.dest: _value_of(argument, given) for argument in texts}
        reached = (call for call in self.calls if not any(_contradicts(need, values) for need in call.needs))
        return replace(self, calls=tuple(reached))

    def with_files_named(self, given: Sequence[str]) -> ScriptFacts:
        """Return these facts with the files that arguments of the command line name."""
        values = {argument.dest: _value_of(argument, given) for argument in self.arguments}
        values |= {keyword.name: keyword.value for keyword in self.training_arguments}
        reads = (replace(read, file=_named_file(read.file, values, given)) for read in self.early_reads)
        return replace(self, early_reads=tuple(reads))

    def with_accumulation_of(self, given: Sequence[str], *, are_all: bool) -> ScriptFacts:
        """Return these facts with the steps of accumulation, and what else Accelerator() gets, of a line.

        Args:
            given: the script's arguments.
            are_all: True if the script gets no others, so that the values are certain.
        """
        options = {argument.dest: argument for argument in self.arguments}
        confidence = Confidence.CERTAIN if are_all else Confidence.LIKELY
        found = []
        for keyword in self.accelerator_arguments:
            argument = options.get(str(keyword.value))
            value: Any = _value_of(argument, given) if argument else _UNKNOWN
            if value is not _UNKNOWN:
                text = f"{keyword.name.rpartition('.')[2]}={value}"
                found.append(replace(keyword, value=value, text=text, confidence=confidence))
        calls = (_with_period(call, options, given, are_all=are_all) for call in self.calls)
        return replace(self, accelerator_keywords=(*self.accelerator_keywords, *found), calls=tuple(calls))

    def training_argument(self, name: str, given: Sequence[str]) -> object:
        """Return a TrainingArguments' value on a command line, as the source shows it; None if unknown."""
        literals = {keyword.value for keyword in self.training_arguments if keyword.name == name}
        dests = {keyword.value for keyword in self.parsed_training_arguments if keyword.name == name}
        found: list[object] = [*literals]
        if self.parses_plain_arguments and not literals:
            options = (f"--{name}", f"--{name.replace('_', '-')}")
            found.append(
                _value_of(ScriptArgument(dest=name, options=options, sets=None, default=None), given)
            )
        found += [_value_of(argument, given) for argument in self.arguments if argument.dest in dests]
        return found[0] if len(found) == 1 and found[0] is not _UNKNOWN else None

    def find(self, *actions: Action) -> tuple[ScriptCall, ...]:
        """Return the calls with these actions."""
        return tuple(call for call in self.calls if call.action in actions)


_UNKNOWN = object()


def _value_of(argument: ScriptArgument, given: Sequence[str]) -> object:
    """Return an option's value on a command line; _UNKNOWN if it is not certain."""
    value: object = argument.default
    for place, word in enumerate(given):
        name, is_assigned, text = word.partition("=")
        is_short = word.startswith("-") and not word.startswith("--")
        if is_short and any(not option.startswith("--") for option in argument.options):
            return _UNKNOWN  # short options may be joined, or to their value
        # argparse takes abbreviations.
        if word == "--":
            break
        if not name.startswith("--") or not any(option.startswith(name) for option in argument.options):
            continue
        if argument.sets is not None:
            value = argument.sets
        else:
            value = text if is_assigned else given[place + 1] if place + 1 < len(given) else _UNKNOWN
    return _converted(argument, value)


def _with_period(
    call: ScriptCall, options: Mapping[str, ScriptArgument], given: Sequence[str], *, are_all: bool
) -> ScriptCall:
    """Return a zero_grad() with the number of micro-batches between two steps that a command line gives."""
    argument = options.get(call.clears.argument) if call.clears and call.clears.argument else None
    value = _value_of(argument, given) if argument else _UNKNOWN
    if call.clears is None or not are_all or type(value) is not int:
        return call
    return replace(call, clears=replace(call.clears, argument=None) if value > 1 else None)


def _converted(argument: ScriptArgument, value: object) -> object:
    if argument.number is None or not isinstance(value, str):
        return value
    try:
        return argument.number(value)
    except ValueError:
        return _UNKNOWN


def _named_file(
    file: ConfigFile | None, values: Mapping[str, object], given: Sequence[str]
) -> ConfigFile | None:
    """Return a file with its name, if the argument that gives it is known."""
    if file is None or file.argument is None:
        return file
    as_text = ScriptArgument(dest=file.argument, options=(f"--{file.argument}",), sets=None, default=None)
    value = values[file.argument] if file.argument in values else _value_of(as_text, given)
    return replace(file, name=value) if isinstance(value, str) else file


def _contradicts(need: tuple[str, str, Plain], values: Mapping[str, object]) -> bool:
    """Return True if a condition on an argument certainly does not hold."""
    dest, comparison, wanted = need
    value = values.get(dest, _UNKNOWN)
    if value is _UNKNOWN:
        return False
    if comparison == "==":
        return value != wanted
    if comparison:
        return (value is None) == ((comparison == "is None") != wanted)
    return bool(value) != wanted


class Action(StrEnum):
    """The effect of a call, as far as rules need it."""

    MAKE_ACCELERATOR = "Accelerator()"
    MAKE_ARGUMENTS = "TrainingArguments()"
    PARSE_ARGUMENTS = "HfArgumentParser.parse_args_into_dataclasses()"
    """Creates TrainingArguments from the command line."""
    MAKE_PARSER = "ArgumentParser()"
    PARSE_STRICTLY = "ArgumentParser.parse_args()"
    """Exits at unknown arguments."""
    MAKE_HF_CONFIG = "HfDeepSpeedConfig()"
    MAKE_PLUGIN = "DeepSpeedPlugin()"
    QUANTIZE = "BitsAndBytesConfig()"
    MAKE_FSDP_PLUGIN = "FullyShardedDataParallelPlugin()"
    MAKE_TRAINER = "Trainer()"
    MAKE_MODEL = "a model is made"
    MAKE_DUMMY_SCHEDULER = "DummyScheduler()"
    GATHER_STATE_DICT = "a helper that gathers parameters gets state_dict()"
    INITIALIZE = "deepspeed.initialize()"
    ZERO_INIT = "deepspeed.zero.Init()"
    SET_UP_RANKS = "deepspeed.init_distributed() or PartialState()"
    PREPARE = "Accelerator.prepare()"
    RESIZE = "resize_token_embeddings()"
    COMPILE = "torch.compile()"
    CHECKPOINT_ACTIVATIONS = "gradient_checkpointing_enable()"
    TUNE_PREFIX = "PrefixTuningConfig()"
    STOP_EARLY = "EarlyStoppingCallback()"
    MAKE_SAMPLER = "DistributedSampler()"
    ACCUMULATE = "Accelerator.accumulate() or no_sync()"
    USE_WRAPPED = "an attribute of a prepared model that a wrapper lacks"
    FORWARD = "model()"
    GENERATE = "generate()"
    GENERATE_TOGETHER = "zerofit.generate()"
    """Keeps the ranks in step itself; every rank calls it."""
    BACKWARD = "backward()"
    DIFFERENTIATE_TWICE = "torch.autograd.grad(create_graph=True)"
    """Gradients that a loss may contain: a gradient penalty."""
    BACKWARD_OF_LOSS = "loss.backward()"
    """Of a tensor, bypassing the Accelerator and the engine."""
    CLIP = "clip_grad_norm_()"
    CLIP_VALUE = "Accelerator.clip_grad_value_()"
    STEP = "optimizer.step()"
    STEP_SCHEDULE = "scheduler.step()"
    STEP_UNKNOWN = "step() of something unknown"
    STEP_SCALED = "GradScaler.step()"
    ZERO_GRAD = "zero_grad()"
    SAVE_PRETRAINED = "save_pretrained()"
    STATE_DICT = "state_dict()"
    LOAD_STATE_DICT = "load_state_dict()"
    GET_STATE_DICT = "Accelerator.get_state_dict()"
    SAVE_MODEL = "save_model()"
    SAVE_16BIT_MODEL = "save_16bit_model()"
    GATHER_PARAMETERS = "GatheredParameters()"
    GATHER_SHARDS = "set_state_dict_type() or merge_fsdp_weights()"
    SAVE_STATE = "save_state()"
    LOAD_STATE = "Accelerator.load_state()"
    SAVE_CHECKPOINT = "save_checkpoint()"
    WAIT = "wait_for_everyone() or barrier()"
    GATHER = "gather() or reduce()"
    TRAIN = "Trainer.train()"
    EVALUATE = "Trainer.evaluate() or predict()"


class ModelConstructor(StrEnum):
    """How a model is created."""

    PRETRAINED = "from_pretrained()"
    CONFIG = "from_config()"
    CLASS = "a class of transformers, called"
    OWN_CLASS = "a class of the script, of torch or of diffusers"


class ModelState(StrEnum):
    """The state of a model at a call."""

    PLAIN = "plain"
    ENGINE = "engine"
    """The return value of prepare() or deepspeed.initialize()."""
    IN_ENGINE = "in engine"
    """The module inside an engine."""
