"""Who reads a script's DeepSpeed file first: HfDeepSpeedConfig(), zero.Init() or Accelerator()."""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING

from zerofit.core.setting import Confidence
from zerofit.scripts.facts import Action, ConfigFile, EarlyRead, ModelConstructor
from zerofit.scripts.source import names
from zerofit.scripts.source.conditions import exclude
from zerofit.scripts.source.values import Constant, ObjectKind, TrackedObject

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zerofit.scripts.source.reading import CallSite, Reading, RecordedCall
    from zerofit.scripts.source.values import Scope, Value

_READS = {"get", "items", "keys", "values", "read", "read_text", "copy", "close"}
"""Methods of a file or dictionary that change nothing."""
_SAME_CONTENT = {"read", "read_text", "copy", "open"}
_ONLY_LOOK = {
    "print", "int", "float", "bool", "str", "len", "repr", "isinstance", "dumps", "dump", "pprint", "info",
    "debug", "warning", "exists", "isfile",
}  # fmt: skip
"""Functions that leave a configuration as it is."""
_FILLS_IN = (Action.MAKE_ACCELERATOR, Action.MAKE_ARGUMENTS, Action.PARSE_ARGUMENTS)
"""Calls after which transformers has a configuration that was filled in."""
_SETS_UP_RANKS = (*_FILLS_IN, Action.INITIALIZE, Action.SET_UP_RANKS)
_HOLDERS = (Action.MAKE_HF_CONFIG, Action.MAKE_ACCELERATOR)
_QUANTIZES = {"quantization_config", "load_in_4bit", "load_in_8bit"}
"""Arguments of from_pretrained() without zero.Init(): transformers does not partition quantized weights."""
_KNOWS_ZERO3 = (ModelConstructor.PRETRAINED, ModelConstructor.CONFIG)


def call_builtin(reading: Reading, name: str, call: CallSite) -> Value:
    """Return the file that open() opens; None for any other function."""
    is_open = isinstance(call.node, ast.Call) and isinstance(call.node.func, ast.Name) and name == "open"
    return opened(reading, call, "file") if is_open else None


def opened(reading: Reading, call: CallSite, name: str) -> Value:
    """Return the file that an argument of open() or Path() names, by a literal or an expression."""
    file, expression = named_file(reading, call, name, 0), call.expression(name, 0)
    if file is None and expression is not None:
        file = ConfigFile(argument=ast.unparse(expression))
    return TrackedObject(kind=ObjectKind.CONFIG, node=call.node, file=file) if file else None


def named_file(reading: Reading, call: CallSite, name: str, place: int) -> ConfigFile | None:
    """Return the file that an argument of a call names; None if unknown."""
    value = call.value(name, place)
    if isinstance(value, TrackedObject) and value.kind is ObjectKind.CONFIG:
        return value.file
    if isinstance(value, Constant):
        return ConfigFile(name=value.value) if isinstance(value.value, str) else None
    expression = call.expression(name, place)
    if value is None and isinstance(expression, ast.Name):
        assigned = reading.scope.assigned(expression.id)
        expression = assigned[0] if len(assigned) == 1 else None
    if isinstance(value, TrackedObject) or not isinstance(expression, ast.Attribute):
        return None
    owner = ast.unparse(expression.value)
    is_set = bool(reading.scope.assigned(f"{owner}.{expression.attr}"))
    # Of parsed arguments, such as `training_args.deepspeed`; another object's attribute may be anything.
    return ConfigFile(argument=expression.attr) if "arg" in owner.lower() and not is_set else None


def literal_of(node: ast.Dict) -> Value:
    """Return the configuration in a dictionary of the script; its content is unknown if it is computed."""
    try:
        text, _ = _json_of(node, 1)
    except (ValueError, TypeError):
        file = None
    else:
        file = ConfigFile(literal=text)
    return TrackedObject(kind=ObjectKind.CONFIG, node=node, file=file)


def _json_of(node: ast.expr, line: int) -> tuple[str, int]:
    """Return a literal as JSON with keys in their lines, and the line where it ends.

    Raises:
        ValueError, TypeError: it is no literal, or has no form in JSON.
    """
    if not isinstance(node, ast.Dict):
        return json.dumps(ast.literal_eval(node)), line
    text = "{"
    for number, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
            raise ValueError("not a name")
        text += ("," if number else "") + "\n" * (key.lineno - line)
        content, line = _json_of(value, max(line, key.lineno))
        text += f"{json.dumps(key.value)}: {content}"
    return f"{text}}}", line


def content_of(call: CallSite) -> Value:
    """Return the content of a file that is parsed or copied; None for anything else."""
    value = call.arguments[0] if call.arguments else None
    return value if isinstance(value, TrackedObject) and value.kind is ObjectKind.CONFIG else None


def call_config(tracked: TrackedObject, name: str, call: CallSite) -> Value:
    """Return the result of a method of a file or of its content, and note what changes the content."""
    if name not in _READS:
        mark_changed((tracked,))
    # A section may be changed too: get() and setdefault() return it.
    return tracked if name in _SAME_CONTENT or name == "get" else None


def mark_changed(values: Iterable[Value], called: str = "") -> None:
    """Mark configurations as changed by the script, or by a function that it passes them to."""
    for value in values:
        if isinstance(value, TrackedObject) and value.kind is ObjectKind.CONFIG and called not in _ONLY_LOOK:
            value.file = None


def record_reader(reading: Reading, name: str, call: CallSite) -> Value:
    """Record HfDeepSpeedConfig() or zero.Init(), with the file that it is given."""
    is_init = name == names.ZERO_INIT
    given = ("config_dict_or_path", 5) if is_init else ("config_file_or_dict", 0)
    file = named_file(reading, call, *given)
    action = Action.ZERO_INIT if is_init else Action.MAKE_HF_CONFIG
    made = TrackedObject(kind=ObjectKind.HF_CONFIG, node=call.node, file=file)
    if file is not None and file.literal is not None:
        value = call.value(*given)
        made.of = value if isinstance(value, TrackedObject) else None
    reading.record_with_keywords(action, call, made)
    return None if is_init else made


def drop(reading: Reading, value: Value) -> None:
    """Mark an HfDeepSpeedConfig that nothing refers to any more."""
    if isinstance(value, TrackedObject) and value.kind is ObjectKind.HF_CONFIG:
        value.dropped_at = len(reading.calls)


def drop_locals(reading: Reading, function: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
    """Mark the HfDeepSpeedConfigs that only local names of a function referred to, where it returns."""
    local = {
        name: value
        for name, value in scope.names.items()
        if isinstance(value, TrackedObject) and value.kind is ObjectKind.HF_CONFIG and name != "return"
    }
    if not local:
        return
    nodes = list(ast.walk(function))
    made_here = {id(node) for node in nodes}
    lives_on = any(isinstance(node, (ast.Global, ast.Nonlocal, ast.Yield, ast.Lambda)) for node in nodes)
    used = {part.id for node in nodes for part in _handed_on(node) if isinstance(part, ast.Name)}
    for name, value in local.items():
        if id(value.node) in made_here and name not in used and not lives_on:
            drop(reading, value)


def _handed_on(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a statement returns or stores, or that a call passes on."""
    if isinstance(node, ast.Call):
        return [*node.args, *(keyword.value for keyword in node.keywords)]
    if isinstance(node, (ast.Return, ast.Assign)) and node.value is not None:
        return [part for part in ast.walk(node.value) if isinstance(part, ast.expr)]
    return []


def find_early_reads(reading: Reading) -> Iterator[EarlyRead]:
    """Yield each read of a DeepSpeed file before all of it is filled in, in the script's order."""
    for number, seen in enumerate(reading.calls):
        before = [other for other in reading.calls[:number] if other.root == seen.root]
        if seen.action is Action.ZERO_INIT:
            yield _read(reading, seen, seen, before)
        elif seen.action is Action.MAKE_MODEL and seen.tracked and seen.tracked.source in _KNOWS_ZERO3:
            is_whole = seen.tracked.given & _QUANTIZES or seen.tracked.is_under_zero_context
            holder = None if is_whole else _holder(seen, before)
            if holder is not None:
                yield _read(reading, holder, seen, before)


def _holder(model: RecordedCall, before: list[RecordedCall]) -> RecordedCall | None:
    """Return the HfDeepSpeedConfig() or Accelerator() whose configuration transformers uses for a model.

    It is the last one that was made; None if that is TrainingArguments, which fill all of it in.
    """
    for seen in reversed(before):
        if seen.action in (*_FILLS_IN, Action.MAKE_HF_CONFIG) and not exclude(
            seen.conditions, model.conditions
        ):
            return seen if seen.action in _HOLDERS else None
    return None


def _read(
    reading: Reading, reader: RecordedCall, seen: RecordedCall, before: list[RecordedCall]
) -> EarlyRead:
    tracked = reader.tracked
    # A condition on DeepSpeed or the stage holds in a run that reads the file.
    conditions = [
        condition for condition in (*reader.conditions, *seen.conditions) if not condition.is_about_framework
    ]
    is_open = "**" in (seen.tracked.given if seen.tracked else ())
    is_sure = not (conditions or seen.root or reader.loops or seen.loops or is_open)
    dropped_at = tracked.dropped_at if tracked else None
    # A dictionary that is changed later is another one where the engine reads it.
    is_changed = tracked is not None and tracked.of is not None and tracked.of.file is None
    return EarlyRead(
        reader=reading.text.snippet(reader.node),
        at=reading.text.snippet(seen.node),
        file=tracked.file if tracked and not is_changed else None,
        # The caller of a function that is read on its own may have set up the ranks.
        is_by_accelerate=reader.action is Action.MAKE_ACCELERATOR,
        knows_ranks=seen.root > 0 or any(other.action in _SETS_UP_RANKS for other in before),
        is_dropped=dropped_at is not None and dropped_at <= reading.calls.index(seen),
        confidence=Confidence.CERTAIN if is_sure else Confidence.LIKELY,
    )
