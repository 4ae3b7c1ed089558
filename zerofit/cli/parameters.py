"""Parameter types of all verbs: choices, numbers within bounds, parsed values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zerofit.cli.completion import matching
from zerofit.core.errors import UserError, bad_value, nearest
from zerofit.core.strategy import DTYPES, OffloadDevice, Precision, ZeroStage
from zerofit.models.task import Task

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    # accelerate and torchrun write flags with underscores, zerofit with hyphens; both are accepted.
    "token_normalize_func": lambda token: token.replace("_", "-"),
}
"""click's context settings of every verb."""

_Command = TypeVar("_Command", bound="Callable[..., Any]")
_TYPED = "zerofit: typed words"
"""Key of the typed command line in a context."""

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click import ParamType as ParamType
    from click.shell_completion import CompletionItem

    from zerofit.planning.sources.typed_line import TypedLine
else:

    class ParamType(click.ParamType):
        """click's ParamType, which from 8.4 on is generic in the type it converts to."""

        def __class_getitem__(cls, _: Any) -> type:
            return cls


ONE_OF = "; one of "
"""What precedes a list of words that --help leaves to --help-all."""
_LONGEST_METAVAR = 64
"""Maximum characters of the choices beside an option's name in --help."""


class Word(ParamType[Any]):
    """One of a few words, each standing for a value; a wrong one gets the most similar as suggestion.

    Args:
        name: for the help.
        words: the value of each word, or an enum, whose values are the words.
    """

    def __init__(self, name: str, words: Mapping[str, Any] | type[Enum]) -> None:
        self.name = name
        self._words = dict(words) if isinstance(words, Mapping) else {word.value: word for word in words}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        word = value.lower().replace("_", "-")
        if word in self._words:
            return self._words[word]
        flag = param.opts[0] if param else self.name
        near = nearest(word, self._words)
        raise UserError(
            f"unknown-{self.name.replace('_', '-')}",
            f"{flag} can't be {value!r}",
            found=f"{flag} {value}",
            why=f"it must be one of {', '.join(self._words)}",
            fix=f"did you mean {flag} {near}?" if near else "name one of them",
        )

    @property
    def words(self) -> tuple[str, ...]:
        """All valid words."""
        return tuple(self._words)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        words = "|".join(self._words)
        return f"[{words}]" if len(words) <= _LONGEST_METAVAR else self.name.upper()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return matching(self._words, incomplete)

    def listed(self, sentence: str) -> str:
        """Return the help of an option with too many choices to list beside its name."""
        return f"{sentence.rstrip('.')}{ONE_OF}{', '.join(self._words)}."


def listed(words: Word) -> str:
    """Return the choices in a sentence: "none, cpu or nvme"."""
    return f"{', '.join(words.words[:-1])} or {words.words[-1]}"


TASK = Word("task", Task)
OFFLOAD = Word("offload", OffloadDevice)
ZERO_STAGE = Word("zero-stage", {str(stage.value): stage for stage in ZeroStage})
DTYPE = Word("dtype", {precision.value: precision for precision in Precision} | DTYPES)


class Parsed(ParamType[Any]):
    """A value parsed from a text.

    Args:
        name: for the help.
        parse: returns the value of a text; raises ValueError if invalid.
        why: what is valid.
        fix: how to write a value.
    """

    def __init__(self, name: str, parse: Callable[[str], Any], *, why: str, fix: str) -> None:
        self.name, self._parse, self._why, self._fix = name, parse, why, fix

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError:
            flag = param.opts[0] if param else self.name
            raise bad_value(flag, value, why=self._why, fix=self._fix) from None


class VerbGroup(click.Group):
    """Verbs of one subject, listed with their whole first sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs; click itself cuts their sentences at the width of the terminal."""
        names = self.list_commands(ctx)
        verbs = [(name, verb) for name in names if (verb := self.get_command(ctx, name)) is not None]
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.get_short_help_str(limit=_NO_LIMIT)) for name, verb in verbs])


_NO_LIMIT = 10_000
"""Characters of a sentence, more than any has."""


class Verb(click.Command):
    """A verb whose name is included in errors on its command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        remember_typed(ctx, args)
        with _of_context(ctx):
            return super().parse_args(ctx, args)

    def peek(self, ctx: click.Context, args: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the unconverted values of a command line by parameter, and the words left over."""
        with _of_context(ctx):
            values, rest, _ = self.make_parser(ctx).parse_args(list(args))
        return values, rest

    def missing(self, ctx: click.Context) -> list[click.Parameter]:
        """Return each required parameter that the command line lacks; click reports only the first."""
        given, _ = self.peek(ctx, list(ctx.meta[_TYPED]))
        present = {name for name, value in given.items() if isinstance(value, str | tuple) and value}
        return [param for param in self.get_params(ctx) if param.required and param.name not in present]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return flags, but none after SCRIPT, where they would be the script's."""
        is_after = not ctx.allow_interspersed_args and any(
            ctx.params.get(param.name or "") for param in self.params if isinstance(param, click.Argument)
        )
        return [] if is_after else super().shell_complete(ctx, incomplete)


@contextmanager
def _of_context(ctx: click.Context) -> Iterator[None]:
    """Set the context of click's errors, which it omits if a flag lacks its value."""
    try:
        yield
    except click.UsageError as error:
        error.ctx = ctx
        raise


def remember_typed(ctx: click.Context, args: list[str]) -> None:
    """Store a verb's command line as typed, for `typed_words`."""
    if _TYPED not in ctx.meta:
        ctx.meta[_TYPED] = tuple(args)


def typed_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the running verb's command line as typed: up to the script, and from it on."""
    ctx = click.get_current_context(silent=True)
    if ctx is None:
        return (), ()
    words = ctx.meta[_TYPED]
    script = tuple(word for word in (ctx.params.get("script"),) if word) + (
        ctx.params.get("script_args") or ()
    )
    split = len(words) - len(script)
    return (*ctx.command_path.split(), *words[:split]), words[split:]


def typed_line() -> TypedLine:
    """Return the running verb's command line flag by flag, each in its first spelling and in their order."""
    from zerofit.planning.sources.typed_line import TypedFlag, TypedLine  # imported only if needed

    ctx = click.get_current_context(silent=True)
    if ctx is None:
        return TypedLine()
    words, script = typed_words()
    path = ctx.command_path.split()
    verb = path if ctx.parent is not None else [*path, str(ctx.command.name)]
    values, _, order = ctx.command.make_parser(ctx).parse_args(list(words[len(path) :]))
    flags: list[TypedFlag] = []
    for option in dict.fromkeys(order):
        if not isinstance(option, click.Option) or option.name is None:
            continue
        given = values[option.name]
        if option.is_flag:
            spelling = option.opts[0] if given else option.secondary_opts[0]
            flags.append(TypedFlag(name=option.name, words=(spelling,)))
        for value in () if option.is_flag else given if option.multiple else (given,):
            flags.append(TypedFlag(name=option.name, words=(option.opts[0], value)))
    if not script:
        arguments = [param.name or "" for param in ctx.command.params if isinstance(param, click.Argument)]
        words_of = [ctx.params.get(name) or () for name in arguments]
        script = tuple(word for value in words_of for word in ((value,) if isinstance(value, str) else value))
    return TypedLine(verb=tuple(verb), flags=tuple(flags), script=script)


class Number(ParamType[float | str]):
    """A finite number within bounds.

    Args:
        kind: int for integers, or float.
        least: minimum.
        most: maximum; None for none.
        without_least: whether the minimum is exclusive.
        words: keywords accepted instead of a number.
    """

    def __init__(
        self,
        kind: type[int] | type[float],
        *,
        least: int,
        most: int | None = None,
        without_least: bool = False,
        words: tuple[str, ...] = (),
    ) -> None:
        self.name = "integer" if kind is int else "number"
        self._kind = kind
        self._least = least
        self._most = most
        self._without_least = without_least
        self._words = words

    @property
    def words(self) -> tuple[str, ...]:
        """Keywords accepted instead of a number."""
        return self._words

    @property
    def is_whole(self) -> bool:
        """True for an integer."""
        return self._kind is int

    @property
    def meaning(self) -> str:
        """The valid values, in words."""
        kind = "whole number" if self.is_whole else "number"
        least = f"above {self._least}" if self._without_least else f"of at least {self._least}"
        both = f"{least} and at most" if self._without_least else f"from {self._least} to"
        bounds = least if self._most is None else f"{both} {self._most}"
        return f"{' or '.join([*self._words, ''])}a {kind} {bounds}"

    def takes(self, number: float) -> bool:
        """Return True if a number is within the bounds."""
        is_enough = number > self._least if self._without_least else number >= self._least
        try:
            return math.isfinite(number) and is_enough and (self._most is None or number <= self._most)
        except OverflowError:  # an integer of hundreds of digits
            return False

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | str:
        if value in self._words:
            return str(value)
        try:
            number = self._kind(value)
        except ValueError:
            number = math.nan
        if not self.takes(number):
            flag = param.opts[0] if param else self.name
            fix = f"see {ctx.command_path if ctx else 'zerofit'} --help"
            raise bad_value(flag, value, why=f"it is {self.meaning}", fix=fix)
        return number

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return matching(self._words, incomplete)


POSITIVE = Number(int, least=1)


def option_group(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds options to a command, in this order."""

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def number_option(
    *names: str,
    help: str,  # noqa: A002 - as click calls it
    kind: type[int] | type[float] = int,
    least: int = 1,
    default: float | None = None,
    metavar: str | None = None,
) -> Callable[[_Command], _Command]:
    """Return an option for a number; the help includes its default, if any."""
    number, shows = Number(kind, least=least), default is not None
    return click.option(*names, type=number, default=default, show_default=shows, metavar=metavar, help=help)
