"""Options of from_pretrained() that parsed arguments decide: device_map, and bitsandbytes' quantization.

The expressions are followed through variables, dictionaries that are unpacked, and functions of the script.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from zerofit.scripts.facts import ModelOption, Quantization
from zerofit.scripts.source.conditions import facts_of_test, names_framework
from zerofit.scripts.source.names import called_name
from zerofit.scripts.source.values import Constant, LocalFunction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.scripts.source.reading import CallSite, Reading
    from zerofit.scripts.source.values import Scope

_MAX_STEPS = 6
"""Maximum number of assignments that an option is followed through. ASSUMPTION: scripts have one or two."""
_DEVICE_MAP = "device_map"
_CONFIG = "quantization_config"
_FLAGS = ("load_in_4bit", "load_in_8bit")
_QUANTIZER = "BitsAndBytesConfig"


def device_map_argument(reading: Reading, call: CallSite) -> ModelOption | None:
    """Return the argument that gives a model's device_map, or that the script computes it."""
    for expression in _option(reading.scope, call.node, _DEVICE_MAP):
        if expression not in reading.conditional and _is_map(reading, expression):
            return ModelOption(argument=None)
        found = _argument(reading.scope, expression)
        if found is not None:
            return ModelOption(argument=found[0], is_replaced=found[1])
    return None


def handles_framework(tree: ast.Module) -> bool:
    """Return True if a script sets its device_map by whether DeepSpeed or ZeRO-3 is used."""
    tests = (node for node in ast.walk(tree) if isinstance(node, (ast.If, ast.IfExp)))
    return any(names_framework(node.test) and _DEVICE_MAP in ast.unparse(node) for node in tests)


def note_quantizer(reading: Reading, call: CallSite) -> None:
    """Note the conditions under which a BitsAndBytesConfig is made."""
    reading.quantizers[call.node] = tuple(reading.conditions)


def note_update(reading: Reading, node: ast.Call) -> None:
    """Note what `kwargs.update(...)` sets."""
    if not isinstance(node.func, ast.Attribute):
        return
    pairs = [(keyword.arg, keyword.value) for keyword in node.keywords if keyword.arg]
    for argument in node.args:
        if isinstance(argument, ast.Dict):
            keys = zip(argument.keys, argument.values, strict=True)
            pairs += [(key.value, value) for key, value in keys if isinstance(key, ast.Constant)]  # type: ignore[misc]
    for key, value in pairs:
        path = f"{ast.unparse(node.func.value)}[{key!r}]"
        reading.scope.expressions.setdefault(path, []).append(value)


def quantization(reading: Reading, call: CallSite) -> Quantization | None:
    """Return what makes bitsandbytes quantize a model that is loaded; None if nothing is known to."""
    found = []
    for expression in _option(reading.scope, call.node, _CONFIG):
        found += _of_config(reading, expression, frozenset())
    for flag in _FLAGS:
        for expression in _option(reading.scope, call.node, flag):
            found += _of_flag(reading, expression, call.node, frozenset())
    always = next((entry for entry in found if not entry.arguments), None)
    if always is not None or not found:
        return always
    arguments = frozenset().union(*(entry.arguments for entry in found))
    return Quantization(made=found[0].made, arguments=arguments)


def flags_given(reading: Reading, call: CallSite) -> frozenset[str]:
    """Return those of load_in_4bit and load_in_8bit that a call gets, also from dictionaries."""
    return frozenset(flag for flag in _FLAGS if any(_option(reading.scope, call.node, flag)))


def _option(scope: Scope, node: ast.expr, name: str) -> Iterator[ast.expr]:
    """Yield the expressions that a call's option may have, also those of dictionaries that are unpacked."""
    for keyword in node.keywords if isinstance(node, ast.Call) else ():
        if keyword.arg == name:
            yield keyword.value
        elif keyword.arg is None:
            yield from _entries(scope, keyword.value, name)


def _entries(scope: Scope, mapping: ast.expr, name: str, steps: int = 0) -> Iterator[ast.expr]:
    if isinstance(mapping, ast.Dict):
        for key, value in zip(mapping.keys, mapping.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == name:
                yield value
            elif key is None and steps < _MAX_STEPS:
                yield from _entries(scope, value, name, steps + 1)
    elif isinstance(mapping, ast.Call) and called_name(mapping) == "dict":
        yield from (keyword.value for keyword in mapping.keywords if keyword.arg == name)
    elif isinstance(mapping, (ast.Name, ast.Attribute)) and steps < _MAX_STEPS:
        path = ast.unparse(mapping)
        for assigned in scope.assigned(path):
            yield from _entries(scope, assigned, name, steps + 1)
        yield from scope.assigned(f"{path}[{name!r}]")


def _argument(scope: Scope, node: ast.expr, steps: int = 0) -> tuple[str, bool] | None:
    """Return the argument whose value an expression has, and True if the script may give it another one."""
    if steps > _MAX_STEPS:
        return None
    match node:
        case ast.Attribute(value=ast.Name() | ast.Attribute()):
            return node.attr, bool(scope.assigned(ast.unparse(node)))
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return key, bool(scope.assigned(ast.unparse(node)))
        case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(key)), *_]):
            return key, False
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(key)), *_]):
            return key, False
        case ast.IfExp():
            arms = [arm for arm in (node.body, node.orelse) if not _is_none(arm)]
        case ast.Name():
            arms = [arm for arm in scope.assigned(node.id) if not _is_none(arm)]
        case _:
            return None
    found = [argument for arm in arms if (argument := _argument(scope, arm, steps + 1)) is not None]
    return (found[0][0], found[0][1] or len(arms) > 1) if found else None


def _is_map(reading: Reading, node: ast.expr, steps: int = 0) -> bool:
    """Return True for a dictionary such as `{"": local_rank}`, or a variable that is nothing else."""
    if isinstance(node, ast.IfExp):
        return all(_is_map(reading, arm, steps + 1) for arm in (node.body, node.orelse))
    if isinstance(node, ast.Name) and steps < _MAX_STEPS:
        made = reading.scope.assigned(node.id)
        is_given = any(node.id in _parameters(function) for function in reading.functions)
        return bool(made) and not is_given and all(_is_map(reading, arm, steps + 1) for arm in made)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text or (isinstance(node, ast.Dict) and bool(node.values))


def _parameters(function: ast.AST) -> set[str]:
    return {part.arg for part in ast.walk(function) if isinstance(part, ast.arg)}


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _of_config(reading: Reading, node: ast.expr, needs: frozenset[str], steps: int = 0) -> list[Quantization]:
    """Return what a quantization_config asks for, with the arguments that it depends on."""
    if steps > _MAX_STEPS or _is_none(node):
        return []
    match node:
        case ast.IfExp():
            named = _names_in(node.test)
            if named is None:
                return []
            return _of_config(reading, node.body, needs | named, steps + 1)
        case ast.Name() | ast.Attribute():
            assigned = reading.scope.assigned(ast.unparse(node))
            return [entry for made in assigned for entry in _of_config(reading, made, needs, steps + 1)]
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            flags = {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}
            return _of_flags(reading, flags, node, needs)
        case ast.Call() if called_name(node) == _QUANTIZER:
            return _of_quantizer(reading, node, needs)
        case ast.Call():
            return _of_function(reading, node, needs, steps)
    return []


def _of_function(reading: Reading, node: ast.Call, needs: frozenset[str], steps: int) -> list[Quantization]:
    """Return what a function that returns a quantization_config may ask for."""
    function = reading.scope.look_up(node.func.id) if isinstance(node.func, ast.Name) else None
    if isinstance(function, LocalFunction):
        made = [part for part in ast.walk(function.node) if isinstance(part, ast.Call)]
        calls = [part for part in made if called_name(part) == _QUANTIZER]
        return [entry for part in calls for entry in _of_config(reading, part, needs, steps + 1)]
    if "quant" in called_name(node).lower():  # such as TRL's get_quantization_config()
        snippet = reading.text.snippet(node)
        return [Quantization(made=snippet, arguments=needs | frozenset(_FLAGS))]
    return []


def _of_quantizer(reading: Reading, node: ast.Call, needs: frozenset[str]) -> list[Quantization]:
    for condition in reading.quantizers.get(node, ()):
        if condition in reading.conditions:
            continue  # the model is loaded under it, too
        named = frozenset() if condition.is_else else _names_in(condition.test)
        if named is None or condition.is_about_framework:
            return []
        needs |= named
    flags = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    return _of_flags(reading, flags, node, needs)


def _of_flags(
    reading: Reading, flags: dict[str, ast.expr], node: ast.expr, needs: frozenset[str]
) -> list[Quantization]:
    given = [flags[flag] for flag in _FLAGS if flag in flags]
    return [entry for value in given for entry in _of_flag(reading, value, node, needs)]


def _of_flag(reading: Reading, value: ast.expr, node: ast.expr, needs: frozenset[str]) -> list[Quantization]:
    """Return the quantization that load_in_4bit or load_in_8bit asks for."""
    known = reading.scope.look_up(value.id) if isinstance(value, ast.Name) else None
    constant: object = value.value if isinstance(value, ast.Constant) else None
    if isinstance(known, Constant):
        constant = known.value
    if constant is not True:
        argument = None if isinstance(constant, bool) else _argument(reading.scope, value)
        if argument is None:
            return []
        needs |= {argument[0]}
    return [Quantization(made=reading.text.snippet(node), arguments=needs)]


def _names_in(test: ast.expr) -> frozenset[str] | None:
    """Return the arguments that have to be true for a condition; None if it is not about arguments."""
    facts = facts_of_test(test, is_else=False)
    texts = [text for text, value in facts if value is True and text.replace(".", "").isidentifier()]
    return frozenset(text.rpartition(".")[2] for text in texts) or None
