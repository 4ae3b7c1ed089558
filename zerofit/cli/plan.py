"""zerofit plan: a script or a model, and a machine, to the fastest strategy that fits."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.completion import complete_file, complete_script
from zerofit.cli.draw_plot import check_can_plot
from zerofit.cli.help_groups import GroupedVerb
from zerofit.cli.launch_lines import launch_line_options, resolve_line_flags
from zerofit.cli.options import (
    check_script_flags,
    field_options,
    module_option,
    num_nodes_option,
    num_processes_option,
    settings_from,
)
from zerofit.cli.output.console import Console, echo, for_terminal, terminal_width
from zerofit.cli.output.html_page import check_can_write_page, write_page
from zerofit.cli.output.plan_compare import plan_comparison
from zerofit.cli.output.plan_html import plan_html
from zerofit.cli.output.plan_json import plan_json
from zerofit.cli.output.plan_why import plan_why
from zerofit.cli.parameters import CONTEXT, Number
from zerofit.cli.plan_options import machine_options, model_options
from zerofit.cli.shared_options import capture_limit_option, wide_option
from zerofit.configs.write.write_files import file_exists, write_files
from zerofit.core.errors import UserError
from zerofit.core.plan import plan_to_json
from zerofit.core.secrets import masked
from zerofit.core.text_table import wrapped
from zerofit.planning.answer_lines import assumed_lines, launch_line
from zerofit.planning.applied_table import changes_text
from zerofit.planning.layout_table import layout_table
from zerofit.planning.layouts import check_open
from zerofit.planning.plan import DOES_NOT_FIT, check_plannable, plan_on_machines
from zerofit.planning.resolve import Verb, resolve
from zerofit.planning.screen_table import first_screen, not_chosen, table_below
from zerofit.planning.sources.settings import plan_from_file
from zerofit.planning.sources.typed_line import TypedFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.planning.run_spec import RunSpec
    from zerofit.planning.solve import Answer
    from zerofit.planning.subject import Subject


@click.command(
    cls=GroupedVerb,
    context_settings={**CONTEXT, "allow_interspersed_args": False},
    groups={
        "Workload": ("model", "sequence_length", "is_fast"),
        "Machine": ("gpus", "prices", "num_nodes", "num_processes", "host_ram"),
        "Output": ("shows_all", "why", "as_json", "output", "html", "plot", "compare_layouts"),
    },
)
@model_options
@machine_options(
    gpus="GPUs of one node, as 8xA100-80G; repeat to compare.",
    takes_several=True,
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="PER_GPU_HOUR",
    type=Number(float, least=0, without_least=True),
    help="Price of a GPU-hour, for each --gpus: adds what steps cost.",
)
@num_nodes_option
@num_processes_option
@launch_line_options
@click.option(
    "--compare-layouts",
    is_flag=True,
    help="List sequence, tensor and pipeline parallel layouts too.",
)
@field_options
@click.option("--all", "shows_all", is_flag=True, help="All strategies, the model, and the peak's terms.")
@click.option("--why", is_flag=True, help="Every reason; every term with its formula and source.")
@wide_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the plan for config --plan and launch --plan.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Overwrite a plan that differs, a file that is no page, or an existing plot.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the whole answer to a file; one page for a browser.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Plot the strategies' memory to a file."
)
@capture_limit_option
@module_option
@click.argument("script", required=False, shell_complete=complete_script)
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_file)
def plan(
    script: str | None,
    script_args: tuple[str, ...],
    module: bool,
    capture_limit_s: float,
    num_nodes: int | None,
    num_processes: int | None,
    config_file: str | None,
    deepspeed_file: str | None,
    gpus: tuple[str, ...],
    prices: tuple[float, ...],
    compare_layouts: bool,
    shows_all: bool,
    why: bool,
    as_json: bool,
    wide: bool,
    output: Path | None,
    force: bool,
    html: Path | None,
    plot: Path | None,
    **flags: Any,
) -> int:
    """Predict what a run needs on each GPU and host, and choose the fastest strategy that fits.

    SCRIPT, with its arguments or as a whole launch line, runs up to its first training step; or name a model
    with --model, --seq-len and --global-batch-size. Needs no GPU: --gpus describes the machine. Strategy
    flags, such as --zero-stage 3, fix parts of the plan. Exits 1 if nothing fits.
    """
    console = Console(shows_details=why)
    if script is not None:
        check_script_flags(script, script_args)
    elif module:
        raise _no_module()
    is_comparison = len(gpus) > 1
    _check_prices(prices, gpus)
    if is_comparison:
        _check_for_one(gpus, output, html, plot)
    flags["gpus"] = gpus[0] if gpus else None
    ranks_per_node = resolve_line_flags(flags)
    spec = resolve(
        None if script is None else (script, *script_args),
        verb=Verb.PLAN,
        module=module,
        capture_limit_s=capture_limit_s,
        num_nodes=num_nodes,
        num_processes=num_processes,
        ranks_per_node=ranks_per_node,
        observer=console,
        config_file=config_file,
        deepspeed_file=deepspeed_file,
        **settings_from(flags),
    )
    if compare_layouts:
        check_open(spec.overrides)
    check_plannable(spec)
    if plot is not None:
        check_can_plot(plot, force=force)
    if html is not None:
        check_can_write_page(html, force=force)
    if output is not None and not force:
        _check_output(output, spec.target)
    if spec.options.is_fast:
        gc.disable()  # in half a second there is no garbage worth collecting
    described = [replace(spec.described, gpus=machine) for machine in gpus] or [spec.described]
    subject, answers = plan_on_machines(spec, described, observer=console, compares_layouts=compare_layouts)
    if plot is not None:
        from zerofit.cli.output.plan_plot import draw_plan

        draw_plan(answers[0], plot)
    width = None if wide else terminal_width()
    is_launchable = spec.target is not None and not is_comparison and answers[0].fits
    is_launchable = is_launchable and (output is None or answers[0].chosen is not None)
    command = _launch_line(output, spec) if is_launchable else ""
    if html is not None:
        write_page(html, plan_html(answers[0], about=subject.lines, command=command))
    if as_json:
        echo(plan_json(answers, subject.capture, prices=prices))
    elif is_comparison:
        shown = subject.lines if shows_all or why else ()
        echo(for_terminal(_comparison(answers, shown, prices, why=why, width=width)))
    else:
        price = prices[0] if prices else None
        text = _text(
            subject, answers[0], command, price=price, shows_all=shows_all or why, why=why, width=width
        )
        echo(for_terminal(text))
    for sentence in assumed_lines(answers, explains=why):
        console.say(sentence)
    if output is not None and answers[0].chosen is None:
        reason = "nothing fits" if answers[0].screen is None else not_chosen(answers[0].screen)
        echo(f"zerofit: {reason}, so {output} is not written", err=True)
        return DOES_NOT_FIT
    if output is not None:
        text = plan_to_json(answers[0].plan)
        write_files({output: text}, force=force, flag="--output FILE", is_private=True)
    return 0 if any(answer.fits for answer in answers) else DOES_NOT_FIT


def _launch_line(output: Path | None, spec: RunSpec) -> str:
    """Return the command that trains with this plan on its GPUs."""
    line = launch_line(spec)
    if output is None:
        return str(line)
    module = tuple(flag for flag in line.flags if flag.name == "module")
    plan_file = TypedFlag(name="plan", words=("--plan", str(output)))
    return str(replace(line, flags=(plan_file, *module)))


def _no_module() -> UserError:
    return UserError(
        "missing-argument",
        "an argument is missing",
        found="-m without SCRIPT",
        why="-m means that SCRIPT is a module, as with python -m",
        fix="name the module after all flags: -m package.train",
    )


def _check_output(output: Path, target: tuple[str, ...] | None) -> None:
    """Check early that --output can be written.

    Raises:
        UserError: a file exists that is not a plan for the same target; such a plan is compared later.
    """
    if not output.exists():
        return
    try:
        found = plan_from_file(output)
        of = None if found.capture is None else found.capture.target
        if of == (None if target is None else masked(target)):
            return
    except UserError:
        pass
    raise file_exists(str(output), flag="--output FILE")


_MORE = "more: --all (every strategy, the model, the peak), --why (every reason)"


def _text(
    subject: Subject,
    answer: Answer,
    command: str,
    *,
    price: float | None,
    shows_all: bool,
    why: bool,
    width: int | None,
) -> str:
    """Return the answer first, then what changes in the script; the rest if it is wanted."""
    parts = [first_screen(answer, command=command, price=price, width=width)]
    if subject.capture is not None and answer.chosen is not None:
        parts += filter(None, [changes_text(answer, width=width)])
    if shows_all and subject.lines:
        parts += ["\n".join(wrapped(subject.lines, width))]
    is_open = answer.screen is not None and answer.chosen is None and answer.fits  # the table is the answer
    if shows_all or is_open or answer.problem.topology.world_size > 1:
        parts += [table_below(answer, shows_all=shows_all, explains=why, width=width)]
    parts += [layout_table(answer, width=width)] if answer.layouts else []
    parts += [plan_why(answer, width=width)] if why else []
    parts += [] if shows_all else ["\n".join(wrapped([_MORE], width))]
    return "\n\n".join(parts)


def _comparison(
    answers: list[Answer],
    subject: Sequence[str],
    prices: Sequence[float],
    *,
    why: bool,
    width: int | None,
) -> str:
    parts = [plan_comparison(answers, prices=prices, width=width)]
    parts += ["\n".join(wrapped(subject, width))] if subject else []
    parts += [layout_table(answer, width=width) for answer in answers if answer.layouts]
    parts += [plan_why(answer, width=width) for answer in answers if why]
    return "\n\n".join(parts)


def _check_prices(prices: tuple[float, ...], gpus: tuple[str, ...]) -> None:
    """Check that each machine has a price, if any has one."""
    count = max(1, len(gpus))
    if prices and len(prices) != count:
        raise UserError(
            "price-for-each-machine",
            f"there must be one --price for each --gpus: {count}",
            found=" ".join((*(f"--gpus {machine}" for machine in gpus), *(f"--price {p:g}" for p in prices))),
            why="the prices belong to the machines in their order",
            fix=f"give --price {'once' if count == 1 else f'{count} times'}, in the order of --gpus",
        )


def _check_for_one(gpus: tuple[str, ...], output: Path | None, html: Path | None, plot: Path | None) -> None:
    """Check that no file is to be written of a comparison."""
    files = (("--output", output), ("--html", html), ("--plot", plot))
    other = next((flag for flag, path in files if path is not None), None)
    if other is not None:
        raise UserError(
            "compare-alone",
            "several --gpus compare machines, but a plan is for one",
            found=" ".join((*(f"--gpus {machine}" for machine in gpus), f"with {other}")),
            why=f"{other} writes the plan of a single machine",
            fix="give --gpus once, for the machine that you choose",
        )
