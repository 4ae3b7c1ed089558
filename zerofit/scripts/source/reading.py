"""Reading: the facts collected from a script so far, and the interpreter's current context."""

from __future__ import annotations

import ast
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from zerofit.core.setting import Confidence
from zerofit.scripts.facts import Action, Keyword, ModelState
from zerofit.scripts.source.values import (
    Constant,
    Mapping,
    ObjectKind,
    RankTest,
    Scope,
    Several,
    TrackedObject,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zerofit.scripts.facts import Plain, ScriptArgument, UsedOptimizer
    from zerofit.scripts.source.script_text import ScriptText
    from zerofit.scripts.source.values import StepCount, Value


class ContextEffect(Enum):
    """The effect of a context manager or decorator on the code in it."""

    ACCUMULATES = auto()
    """Inside `with accelerator.accumulate(model):`."""
    GATHERED = auto()
    NO_GRADIENTS = auto()
    INFERENCE_MODE = auto()
    GUARDED = auto()
    """Inside a `try` that catches something."""
    ZERO_INIT = auto()
    ZERO_CONTEXT = auto()
    """Affects ZeRO by code that is not analysed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One branch of a condition."""

    test: ast.expr
    needs: frozenset[tuple[str, str, Plain]] = frozenset()
    """What it says of parsed arguments, see ScriptCall."""
    is_else: bool = False
    rank: RankTest | None
    is_about_framework: bool = False
    has_remainder: bool = False
    period: int | None = None
    """The 4 of `step % 4 == 0`, if known."""
    period_argument: str | None = None
    """The parsed argument in its place."""
    is_round_robin: bool = False
    """True if it assigns items to ranks round-robin."""
    depth: int
    """Number of loops around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSite:
    """A call with the values of its arguments."""

    node: ast.expr
    """An ast.Call, except for a class of the script that nothing instantiates."""
    arguments: list[Value] = field(default_factory=list)
    keywords: dict[str, Value] = field(default_factory=dict)

    @property
    def values(self) -> tuple[Value, ...]:
        """All arguments."""
        return (*self.arguments, *self.keywords.values())

    def value(self, name: str, place: int) -> Value:
        """Return an argument by its name or position; None if it is missing or unknown."""
        return self.keywords.get(name) or (self.arguments[place] if place < len(self.arguments) else None)

    def expression(self, name: str, place: int) -> ast.expr | None:
        """Return the expression of an argument."""
        if not isinstance(self.node, ast.Call):
            return None
        named = next((keyword.value for keyword in self.node.keywords if keyword.arg == name), None)
        return self.node.args[place] if place < len(self.node.args) else named


@dataclass(eq=False, slots=True, kw_only=True)
class RecordedCall:
    """A call, recorded before the whole script is known."""

    action: Action
    node: ast.expr
    tracked: TrackedObject | None
    state: ModelState | None
    conditions: tuple[Condition, ...]
    loops: tuple[int, ...]
    root: int
    """Number of the separately analysed function; 0 for the module's body."""
    within: frozenset[ContextEffect]
    share: ast.expr | None
    """The expression that decides how often a rank gets here, if ranks differ."""
    keywords: tuple[Keyword, ...] = ()
    given: frozenset[str] = frozenset()
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of ScriptCall."""
    forwards: tuple[RecordedCall, ...] = ()


@dataclass(eq=False, slots=True, kw_only=True)
class Reading:
    """The interpreter's records and context."""

    text: ScriptText
    scope: Scope
    calls: list[RecordedCall] = field(default_factory=list)
    models: list[TrackedObject] = field(default_factory=list)
    optimizers: dict[tuple[int, int], UsedOptimizer] = field(default_factory=dict)
    accelerator_keywords: list[Keyword] = field(default_factory=list)
    accelerator_arguments: list[Keyword] = field(default_factory=list)
    unknown_optimizers: dict[str, TrackedObject] = field(default_factory=dict)
    """Objects of unknown class with a method zero_grad() or step(), by the expression that names them."""
    training_arguments: list[Keyword] = field(default_factory=list)
    parsed_training_arguments: list[Keyword] = field(default_factory=list)
    defaults: dict[str, Plain] = field(default_factory=dict)
    """argparse defaults of the script's own arguments."""
    arguments: dict[str, ScriptArgument | None] = field(default_factory=dict)
    """The parsers' options by destination; None if the value does not follow from the command line."""
    conditions: list[Condition] = field(default_factory=list)
    quantizers: dict[ast.expr, tuple[Condition, ...]] = field(default_factory=dict)
    """Each BitsAndBytesConfig(), and the conditions under which it is made."""
    conditional: set[ast.expr] = field(default_factory=set)
    """Expressions that a key of a dictionary is set to under a condition."""
    loops: list[int] = field(default_factory=list)
    loop_nodes: list[ast.For | ast.AsyncFor | ast.While] = field(default_factory=list)
    """The loops around the present statement, the innermost last."""
    schedules: list[tuple[TrackedObject, ast.expr, StepCount]] = field(default_factory=list)
    """Each scheduler, and the number of steps that it is made for."""
    lengths: dict[ast.expr, bool] = field(default_factory=dict)
    """Each len() of a DataLoader: True if it was prepared at that time."""
    bounds: dict[TrackedObject, list[StepCount]] = field(default_factory=dict)
    """The numbers of steps after which the loops around a scheduler's step() end."""
    functions: list[ast.AST] = field(default_factory=list)
    """Functions being interpreted, the innermost last."""
    visited: set[ast.AST] = field(default_factory=set)
    root: int = 0
    within: list[ContextEffect] = field(default_factory=list)
    """The effects of the active context managers and decorators."""
    one_after_other: list[ast.expr] = field(default_factory=list)
    """The contexts that the main rank passes before the others, innermost last."""
    shares: list[ast.expr] = field(default_factory=list)
    """The loops' iterables that are split by rank, innermost last."""
    has_foreign_accelerator: bool = False
    """True if the separately analysed function got an Accelerator created elsewhere."""
    sets_accumulation: bool = False
    """True if an Accelerator's steps of accumulation are set after it is made."""
    num_nodes: int = 0
    is_in_foreign_trainer: bool = False
    """True if a subclass of Trainer is analysed separately: its methods' arguments are unknown."""

    def record(
        self, action: Action, node: ast.expr, tracked: TrackedObject | None = None, **more: Any
    ) -> None:
        """Record a call."""
        round_robin = (condition.test for condition in self.conditions if condition.is_round_robin)
        self.calls.append(
            RecordedCall(
                action=action,
                node=node,
                tracked=tracked,
                state=state_of(tracked),
                conditions=tuple(self.conditions),
                loops=tuple(self.loops),
                root=self.root,
                within=frozenset(self.within),
                share=self.shares[-1] if self.shares else next(round_robin, None),
                **more,
            )
        )

    @contextmanager
    def inside(self, effect: ContextEffect, *, if_: bool) -> Iterator[None]:
        """Take the code of a block for affected by something, if that is so."""
        num = len(self.within)
        self.within += [effect] * if_
        yield
        del self.within[num:]

    def record_with_keywords(
        self, action: Action, call: CallSite, tracked: TrackedObject | None = None, **more: Any
    ) -> tuple[Keyword, ...]:
        """Record a call and its keyword arguments; return those with known values."""
        found = self.keywords_of(call)
        self.record(action, call.node, tracked, keywords=found, given=given_to(call), **more)
        return found

    def make_model(self, node: ast.expr, **fields: Any) -> TrackedObject:
        """Record a new model."""
        tracked = TrackedObject(
            kind=ObjectKind.MODEL,
            node=node,
            state=ModelState.PLAIN,
            order=len(self.calls),
            is_in_zero_init=ContextEffect.ZERO_INIT in self.within,
            is_under_zero_context=ContextEffect.ZERO_CONTEXT in self.within,
            made_under=frozenset(id(condition.test) for condition in self.conditions),
            **fields,
        )
        self.models.append(tracked)
        first = self.text.snippet(self.one_after_other[-1]) if self.one_after_other else None
        self.record(Action.MAKE_MODEL, node, tracked, given=tracked.given, more={"first_rank": first})
        return tracked

    def certain_keywords_of(self, call: CallSite) -> tuple[Keyword, ...]:
        """Return the keyword arguments of a call; literals are certain in a call that each run makes."""
        found = self.keywords_of(call)
        if self.conditions or self.loops or self.root or not isinstance(call.node, ast.Call):
            return found
        literal = {keyword.arg for keyword in call.node.keywords if _is_literal(keyword.value)}
        return tuple(
            replace(keyword, confidence=Confidence.CERTAIN) if keyword.name in literal else keyword
            for keyword in found
        )

    def keywords_of(self, call: CallSite) -> tuple[Keyword, ...]:
        """Return the keyword arguments of a call with known values."""
        written = call.node.keywords if isinstance(call.node, ast.Call) else []
        places: dict[str | None, ast.expr | ast.keyword] = {keyword.arg: keyword for keyword in written}
        return tuple(
            keyword
            for name, value in call.keywords.items()
            for keyword in self._flat(name, value, places.get(name, call.node))
        )

    def arguments_of(self, call: CallSite, behind: str = "") -> tuple[Keyword, ...]:
        """Return the keyword arguments of a call that are parsed arguments, with their destinations.

        Args:
            call: the call.
            behind: the name of the object that it creates, where it becomes an argument of another.
        """
        found = []
        for keyword in call.node.keywords if isinstance(call.node, ast.Call) else ():
            read = keyword.value
            if not (isinstance(read, ast.Attribute) and isinstance(read.value, ast.Name) and keyword.arg):
                continue
            owner = self.scope.look_up(read.value.id)
            if not isinstance(owner, TrackedObject) or owner.kind is not ObjectKind.NAMESPACE:
                continue
            if not owner.options and read.attr not in owner.attributes:
                place = self.text.snippet(keyword).place
                found.append(Keyword(name=f"{behind}{keyword.arg}", value=read.attr, text="", place=place))
        return tuple(found)

    def _flat(self, name: str, value: Value, node: ast.expr | ast.keyword) -> Iterable[Keyword]:
        if isinstance(value, Mapping):
            for key, item in value.values:
                yield from self._flat(f"{name}.{key}", item, node)
            return
        if isinstance(value, TrackedObject) and value.kind is ObjectKind.CONFIG:
            text = f"{name}=..."
            content = value.file.literal or value.file.name if value.file is not None else None
            if content is not None:
                place = self.text.snippet(node).place
                yield Keyword(name=name, value=content, text=text, place=place)
            return
        is_known, plain = plain_of(value)
        if is_known:
            snippet = self.text.snippet(node)
            text = snippet.text if isinstance(node, ast.keyword) else f"{name}={plain!r}"
            yield Keyword(name=name, value=plain, text=text, place=snippet.place)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def given_to(call: CallSite) -> frozenset[str]:
    """Return the names of all keyword arguments of a call; "**" if some are unpacked."""
    written = call.node.keywords if isinstance(call.node, ast.Call) else []
    return frozenset(call.keywords) | {"**" for keyword in written if keyword.arg is None}


def plain_of(value: Value) -> tuple[bool, Plain]:
    """Return True if a value is a known literal, and the literal."""
    if isinstance(value, Constant):
        return True, value.value
    if isinstance(value, Several):
        items = [plain_of(item) for item in value.values]
        return all(is_known for is_known, _ in items), tuple(item for _, item in items)
    return False, None


def state_of(tracked: TrackedObject | None) -> ModelState | None:
    """Return the state of a model."""
    if tracked is None or tracked.kind is not ObjectKind.MODEL:
        return None
    if tracked.state in (None, ModelState.PLAIN) and tracked.root.is_trained:
        return ModelState.IN_ENGINE
    return tracked.state


def wrapped(tracked: TrackedObject, node: ast.expr, state: ModelState | None) -> TrackedObject:
    """Return a model in another form: an engine, the module inside one, a compiled or adapted one."""
    return TrackedObject(
        kind=ObjectKind.MODEL,
        node=node,
        of=tracked,
        state=state,
        is_compiled=tracked.is_compiled,
        is_adapted=tracked.is_adapted,
        frozen_by=tracked.frozen_by,
        source=tracked.source,
        cls=tracked.cls,
    )
