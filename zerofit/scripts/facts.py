"""ScriptFacts: what a training script's source shows, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from zerofit.core.setting import Confidence, Place

if TYPE_CHECKING:
    from zerofit.core.command import Route

Plain: TypeAlias = str | int | float | bool | tuple["Plain", ...] | None
"""A literal's value; a list is a tuple here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A piece of the source."""

    text: str
    """The user's words, on one line, long ones cut."""
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyword:
    """A keyword argument with a literal value, or with a name that stands for one."""

    name: str
    value: Plain
    line: int
    column: int
    text: str
    """As written: "gradient_accumulation_steps=4"."""
    confidence: Confidence = Confidence.LIKELY
    """CERTAIN where the script was run, and it was seen to come out so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedOptimizer:
    """An optimizer that the script makes."""

    id: str
    """Its id in compat/optimizer_table.py, or "other:" and its dotted name."""
    line: int
    column: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that the script makes."""

    made: Sighting
    source: ModelConstructor
    keywords: tuple[Keyword, ...]
    is_trained: bool
    """True if it comes to prepare(), a Trainer or deepspeed.initialize()."""
    is_in_zero_init: bool
    """True if it is made inside `deepspeed.zero.Init()`."""
    before: Sighting | None
    """The first Accelerator(), TrainingArguments() or HfDeepSpeedConfig(), where that comes afterwards."""
    is_before_all: bool
    """True if nothing that reads the DeepSpeed configuration was made before the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCall:
    """A call that rules look at. A function of the script counts where it is called."""

    action: Action
    seen: Sighting
    state: ModelState | None = None
    """The state of the model that it works on; None where that is not known, or there is none."""
    one_rank: Sighting | None = None
    """The condition, such as `accelerator.is_main_process`, by which some ranks alone get here."""
    is_otherwise: bool = False
    """True if they get here where that condition does not hold: `if not main: return` stands before."""
    is_engine_checked: bool = False
    """True if it stands under a condition on DeepSpeed, FSDP or the ZeRO stage, so that the author knew."""
    is_gathered: bool = False
    """True if it stands inside `GatheredParameters()`."""
    is_in_inference_mode: bool = False
    """True if it stands inside `torch.inference_mode()`."""
    share: Sighting | None = None
    """The expressions that decide how often each rank gets here, where ranks may differ: the loop's
    `prompts[rank::world_size]`, or a condition such as `number % world_size == rank`."""
    trains_before: bool = False
    """FORWARD, GENERATE, EVALUATE: True if the script has trained before it; unknown counts as trained, and
    so does a Trainer that trains in its place, on the other side of a condition."""
    trains_after: bool = False
    """FORWARD, GENERATE, EVALUATE: True if the script goes on to train after it."""
    is_in_each_training: bool = False
    """EVALUATE: True if each run of the script that trains makes it too, whatever its conditions are."""
    is_conditional: bool = False
    """True if it stands under a condition, so that some runs of the script may not make it."""
    every_few_steps: Sighting | None = None
    """The condition on a remainder, such as `step % 4 == 0`, under which it stands inside its loop."""
    loop: int | None = None
    """The line of the innermost loop."""
    keywords: tuple[Keyword, ...] = ()
    given: frozenset[str] = frozenset()
    """Names of all keyword arguments, literal or not; "**" where some are unpacked."""
    options: frozenset[str] = frozenset()
    """PARSE_STRICTLY: the options that the parser takes; "**" where some are not known."""
    is_compiled: bool = False
    """PREPARE: True if one of its models went through torch.compile()."""
    num_models: int = 0
    """PREPARE: how many different models it is given."""
    has_optimizer: bool = False
    """PREPARE, INITIALIZE: True if it is given an optimizer, or something unknown."""
    is_model_left_alone: bool = False
    """FORWARD, GENERATE: True if the model was made by from_pretrained() or from_config() where transformers
    knows the DeepSpeed configuration already, and has come to no engine so far."""
    new_tokens: Confidence | None = None
    """GATHER: how sure it is that it is given what a model generated, as it came, of a length of its own on
    each rank; None where it is not."""
    forwards: tuple[Sighting, ...] = ()
    """BACKWARD: forward passes of one engine, with gradients, since the last backward in the loop."""

    def keyword(self, name: str) -> Keyword | None:
        """Return the literal keyword argument of that name."""
        return next((keyword for keyword in self.keywords if keyword.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """One script, read."""

    name: str
    """The file, as the user named it."""
    route: Route | None
    """Who reads the DeepSpeed configuration, as the script's calls show; None where they do not."""
    optimizers: tuple[UsedOptimizer, ...] = ()
    accelerator_keywords: tuple[Keyword, ...] = ()
    """Literal keyword arguments of Accelerator()."""
    training_arguments: tuple[Keyword, ...] = ()
    """Literal keyword arguments of TrainingArguments() and of the configs of TRL's trainers."""
    calls: tuple[ScriptCall, ...] = ()
    """In the order in which they run, as far as the source shows it."""
    models: tuple[Model, ...] = ()

    def find(self, *actions: Action) -> tuple[ScriptCall, ...]:
        """Return the calls of these actions."""
        return tuple(call for call in self.calls if call.action in actions)


class Action(StrEnum):
    """The effect of a call in the source, as far as rules need it."""

    MAKE_ACCELERATOR = "Accelerator()"
    MAKE_ARGUMENTS = "TrainingArguments()"
    PARSE_ARGUMENTS = "HfArgumentParser.parse_args_into_dataclasses()"
    """Makes TrainingArguments of the command line."""
    PARSE_STRICTLY = "ArgumentParser.parse_args()"
    """Ends the script at an argument that it does not know."""
    MAKE_HF_CONFIG = "HfDeepSpeedConfig()"
    MAKE_PLUGIN = "DeepSpeedPlugin()"
    MAKE_TRAINER = "Trainer()"
    MAKE_MODEL = "a model is made"
    INITIALIZE = "deepspeed.initialize()"
    PREPARE = "Accelerator.prepare()"
    RESIZE = "resize_token_embeddings()"
    COMPILE = "torch.compile()"
    CHECKPOINT_ACTIVATIONS = "gradient_checkpointing_enable()"
    TUNE_PREFIX = "PrefixTuningConfig()"
    ACCUMULATE = "Accelerator.accumulate() or no_sync()"
    FORWARD = "model()"
    GENERATE = "generate()"
    GENERATE_TOGETHER = "zerofit.generate()"
    """Keeps the ranks in step by itself; every rank calls it."""
    BACKWARD = "backward()"
    BACKWARD_OF_LOSS = "loss.backward()"
    """Of a tensor, past the Accelerator and the engine."""
    CLIP = "clip_grad_norm_()"
    STEP = "optimizer.step()"
    SAVE_PRETRAINED = "save_pretrained()"
    STATE_DICT = "state_dict()"
    GET_STATE_DICT = "Accelerator.get_state_dict()"
    SAVE_MODEL = "save_model()"
    SAVE_16BIT_MODEL = "save_16bit_model()"
    GATHER_PARAMETERS = "GatheredParameters()"
    SAVE_STATE = "save_state()"
    SAVE_CHECKPOINT = "save_checkpoint()"
    WAIT = "wait_for_everyone() or barrier()"
    GATHER = "gather() or reduce()"
    TRAIN = "Trainer.train()"
    EVALUATE = "Trainer.evaluate() or predict()"


class ModelConstructor(StrEnum):
    """How a model is made."""

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
    """The module within an engine."""
