"""ScriptFacts: what a training script's source shows, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from zerofit.document import Place
from zerofit.said import Confidence

if TYPE_CHECKING:
    from zerofit.command import Route
    from zerofit.script_words import Action, ModelSource, ModelState

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
    source: ModelSource
    keywords: tuple[Keyword, ...]
    is_trained: bool
    """Whether it comes to prepare(), a Trainer or deepspeed.initialize()."""
    is_in_zero_init: bool
    """Whether it is made inside `deepspeed.zero.Init()`."""
    before: Sighting | None
    """The first Accelerator(), TrainingArguments() or HfDeepSpeedConfig(), where that comes afterwards."""
    is_before_all: bool
    """Whether nothing that reads the DeepSpeed configuration was made before the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that rules look at. A function of the script counts where it is called."""

    action: Action
    seen: Sighting
    state: ModelState | None = None
    """What became of the model that it works on; None where that is not known, or there is none."""
    one_rank: Sighting | None = None
    """The condition, such as `accelerator.is_main_process`, by which some ranks alone get here."""
    is_otherwise: bool = False
    """Whether they get here where that condition does not hold: `if not main: return` stands before."""
    is_engine_checked: bool = False
    """Whether it stands under a condition on DeepSpeed, FSDP or the ZeRO stage, so that the author knew."""
    is_gathered: bool = False
    """Whether it stands inside `GatheredParameters()`."""
    is_in_inference_mode: bool = False
    """Whether it stands inside `torch.inference_mode()`."""
    share: Sighting | None = None
    """What says how often each rank gets here, where one may get here more often than another: the loop's
    `prompts[rank::world_size]`, or a condition such as `number % world_size == rank`."""
    trains_before: bool = False
    """FORWARD, GENERATE, EVALUATE: whether the script has trained before it; unknown counts as trained, and
    so does a Trainer that trains in its place, on the other side of a condition."""
    trains_after: bool = False
    """FORWARD, GENERATE, EVALUATE: whether the script goes on to train after it."""
    is_in_each_training: bool = False
    """EVALUATE: whether each run of the script that trains makes it too, whatever its conditions are."""
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
    """PREPARE: whether one of its models went through torch.compile()."""
    num_models: int = 0
    """PREPARE: how many different models it is given."""
    has_optimizer: bool = False
    """PREPARE, INITIALIZE: whether it is given an optimizer, or something unknown."""
    is_model_left_alone: bool = False
    """FORWARD, GENERATE: whether the model was made by from_pretrained() or from_config() where transformers
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
class Scheduler:
    """A scheduler of the learning rate that goes through Accelerator.prepare()."""

    made: Sighting
    total: str
    """Its number of steps, as written."""


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
    calls: tuple[Call, ...] = ()
    """In the order in which they run, as far as the source shows it."""
    models: tuple[Model, ...] = ()
    schedulers: tuple[Scheduler, ...] = ()
    """Those whose number of steps is counted without the number of ranks and without a DataLoader."""
    routed_experts: tuple[Sighting, ...] = ()
    """Loops over a ModuleList of experts, of which each runs only where the data asks for it."""

    def find(self, *actions: Action) -> tuple[Call, ...]:
        """Return the calls of these actions."""
        return tuple(call for call in self.calls if call.action in actions)
