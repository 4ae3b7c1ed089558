"""Values of names in a script, as far as its source shows. None means unknown."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from zerofit.scripts.facts import (
        ConfigFile,
        Keyword,
        ModelConstructor,
        ModelOption,
        ModelState,
        Plain,
        Quantization,
    )


class ObjectKind(Enum):
    """The kind of an object."""

    ACCELERATOR = auto()
    ARGUMENTS = auto()
    TRAINER = auto()
    MODEL = auto()
    OPTIMIZER = auto()
    LOADER = auto()
    SCHEDULER = auto()
    """A scheduler of the learning rate."""
    ITERATOR = auto()
    """A generator over a DataLoader, which is none itself: `of` is the DataLoader."""
    PARSER = auto()
    """An argparse.ArgumentParser, or a group of one."""
    NAMESPACE = auto()
    """What a parser's parse_args() returns."""
    SCALER = auto()
    """A GradScaler that is enabled."""
    TOKENS = auto()
    """A model's generated output."""
    CONFIG = auto()
    """The content of a configuration file that the script reads, or the open file."""
    HF_CONFIG = auto()
    """A HfDeepSpeedConfig, which transformers only has a weak reference to."""
    OTHER = auto()
    """An instance of a class of the script that is none of these."""


@dataclass(eq=False, slots=True, kw_only=True)
class TrackedObject:
    """One object created by the script."""

    kind: ObjectKind
    node: ast.expr
    """The call that creates it."""
    of: TrackedObject | None = None
    """The object it wraps: the model of a trainer, engine, unwrapped or compiled model."""
    state: ModelState | None = None
    is_compiled: bool = False
    is_adapted: bool = False
    """For a model: True if it has peft adapters, which are mostly small enough for ZeRO-3 to keep whole."""
    frozen_by: ast.expr | None = None
    """For a model: the call that loaded its adapters without is_trainable=True."""
    source: ModelConstructor | None = None
    keywords: tuple[Keyword, ...] = ()
    given: frozenset[str] = frozenset()
    file: ConfigFile | None = None
    """CONFIG, HF_CONFIG: the file that is read; None if unknown, or if the script changed the content."""
    dropped_at: int | None = None
    """HF_CONFIG: number of calls recorded when the last reference to it went; None while there is one."""
    cls: LocalClass | None = None
    attributes: dict[str, Value] = field(default_factory=dict)
    options: set[str] = field(default_factory=set)
    """A parser's options so far; "**" if some are unknown."""
    order: int = 0
    """Number of calls recorded before its creation."""
    is_trained: bool = False
    is_prepared: bool = False
    """For an optimizer, a scheduler or a DataLoader: True if accelerate wraps it."""
    bf16_by: ast.expr | None = None
    """For a model: the call that made its weights bf16."""
    half_by: ast.expr | None = None
    """For a model: the call that made its weights fp16, if the mixed precision is fp16."""
    is_in_pipeline: bool = False
    """For a model: True if it stands for a pipeline that runs it, with methods of its own."""
    has_open_weights: bool = False
    """For a model: True if some of its weights may be frozen, or have another format than the others."""
    device_map: ModelOption | None = None
    quantization: Quantization | None = None
    """For a model: see facts.Model."""
    made_under: frozenset[int] = frozenset()
    """For a model, an optimizer or a scheduler: ids of the conditions under which it is created."""
    is_dummy: bool = False
    """For an optimizer or a scheduler: True if it stands for the section of DeepSpeed's file."""
    has_alternative: bool = False
    """For an optimizer or a scheduler: True if other runs of the script make another in its place."""
    kind_argument: str | None = None
    """For a scheduler: the parsed argument that names its kind."""
    has_sampler: bool = False
    """For a DataLoader: True if it gets a sampler, which may give each rank its own part."""
    has_batch_size: bool = True
    """For a DataLoader: False if it certainly has none."""
    is_in_zero_init: bool = False
    is_under_zero_context: bool = False
    """For a model: True if it is created inside a `with` that affects ZeRO by code that is not analysed."""
    has_escaped: bool = False
    """True if it was passed to code that is not analysed."""

    @property
    def root(self) -> TrackedObject:
        """The object inside all wrappers."""
        tracked = self
        while tracked.of is not None and tracked.of.kind is tracked.kind:
            tracked = tracked.of
        return tracked


@dataclass(eq=False, slots=True, kw_only=True)
class Scope:
    """The names of a function or of the module."""

    names: dict[str, Value] = field(default_factory=dict)
    outer: Scope | None = None
    expressions: dict[str, list[ast.expr]] = field(default_factory=dict)
    """Every expression assigned to a name or an attribute path: "args.max_train_steps"."""

    def look_up(self, name: str) -> Value:
        """Return the value of a name."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return None

    def assigned(self, path: str) -> list[ast.expr]:
        """Return the expressions assigned to a path."""
        found: list[ast.expr] = []
        scope: Scope | None = self
        while scope is not None:
            found += scope.expressions.get(path, [])
            scope = scope.outer
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCount:
    """What a number of steps is made of."""

    parts: frozenset[str] = frozenset()
    """Numbers that it multiplies, but for numbers of micro-batches and of ranks."""
    lengths: frozenset[bool] = frozenset()
    """For the length of each DataLoader in it, True if it was prepared at that time."""
    has_micro_batches: bool = False
    """True if it is multiplied by steps of accumulation."""
    ranks: int = 0
    """Power of the number of ranks in it: 1 if it is multiplied by it, -1 if it is divided."""
    argument: str | None = None
    """A parsed argument in it that the script gives a value where the line does not."""
    is_mixed: bool = False
    """True if a variable in it has several values."""


@dataclass(frozen=True, slots=True)
class Dotted:
    """A module, or a name in it: "torch.optim.AdamW"."""

    name: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal's value, except dictionaries, see Mapping."""

    value: Plain


@dataclass(frozen=True, slots=True)
class HalfOfRun:
    """A number format that is torch.float16 if the run's mixed precision is fp16."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A dictionary with literal keys."""

    values: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Several:
    """A tuple or list."""

    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LocalFunction:
    """A function of the script; for a method with its object."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    this: TrackedObject | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LocalClass:
    """A class of the script."""

    node: ast.ClassDef
    scope: Scope
    bases: tuple[Value, ...]

    def method(self, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the method of that name, from the class or a local base class."""
        for item in self.node.body:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and item.name == name:
                return item
        for base in self.bases:
            found = base.method(name) if isinstance(base, LocalClass) and base is not self else None
            if found is not None:
                return found
        return None

    def foreign_bases(self) -> tuple[str, ...]:
        """Return the dotted names of base classes from other modules."""
        names: list[str] = []
        for base in self.bases:
            if isinstance(base, Dotted):
                names.append(base.name)
            elif isinstance(base, LocalClass) and base is not self:
                names += base.foreign_bases()
        return tuple(names)


@dataclass(frozen=True, slots=True)
class Method:
    """An attribute that the script does not set on the object: `model.generate`."""

    this: TrackedObject
    name: str


@dataclass(frozen=True, slots=True)
class RankTest:
    """A condition that only holds on some ranks."""

    is_main: bool
    """True if it holds on the main rank, False if it holds on the others."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank number."""


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of something, or a value made from one."""


Value: TypeAlias = (
    TrackedObject
    | Dotted
    | Constant
    | HalfOfRun
    | Mapping
    | Several
    | LocalFunction
    | LocalClass
    | Method
    | RankTest
    | Rank
    | Share
    | None
)


def join(first: Value, second: Value) -> Value:
    """Return the value of a name after two branches: None if they differ."""
    if first == second or second == Constant(None):
        return first
    if first == Constant(None):
        return second
    if isinstance(first, TrackedObject) and isinstance(second, TrackedObject):
        is_alike = first.kind is second.kind and first.state is second.state and first.cls is second.cls
        if (first.root.bf16_by is None) is not (second.root.bf16_by is None):
            second.root.has_open_weights = True
        if (first.root.half_by is None) is not (second.root.half_by is None):
            second.root.has_open_weights = True
        if is_alike:
            first.has_alternative = second.has_alternative = True
        return second if is_alike else None
    return None
