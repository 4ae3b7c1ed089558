"""The pages of docs/reference of what was measured: evidence of the rules, optimizers and versions."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from zerofit.checking.rules.optimizer.table import OPTIMIZERS, OptimizerAnswer, verdict
from zerofit.core.command import Route
from zerofit.core.optimizers.table import ENTRIES
from zerofit.core.strategy import OffloadDevice, ZeroStage
from zerofit.core.supported import PYTHON, SUPPORTED
from zerofit.core.units import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerofit.checking.rules.optimizer.table import OptimizerRow
    from zerofit.core.optimizers.entry import OptimizerEntry


_SHARDED, _WHOLE = ZeroStage.GRADIENTS, ZeroStage.PARAMETERS
_NATIVE: dict[str, Any] = {"zero_stage": _SHARDED, "route": Route.NATIVE}
_OFFLOADED: dict[str, Any] = {"zero_stage": _WHOLE, "optimizer_offload": OffloadDevice.CPU}
_PLACEMENTS: dict[str, dict[str, Any]] = {
    "ZeRO-0": {"zero_stage": ZeroStage.NOTHING},
    "ZeRO-1 and 2": {"zero_stage": _SHARDED},
    "ZeRO-3": {"zero_stage": _WHOLE},
    "optimizer offload": _OFFLOADED,
    "optimizer offload, zero_force_ds_cpu_optimizer: false": {**_OFFLOADED, "forces_cpu_optimizer": False},
    "deepspeed.initialize()": _NATIVE,
    "deepspeed.initialize(), zero_allow_untested_optimizer: true": {**_NATIVE, "allows_untested": True},
    "deepspeed.initialize(), optimizer offload": {
        **_NATIVE,
        "optimizer_offload": OffloadDevice.CPU,
        "allows_untested": True,
    },
}
"""The columns of the optimizer table; where no route is named, with accelerate or Trainer."""
_DEFAULT: dict[str, Any] = {
    "optimizer_offload": OffloadDevice.NONE,
    "forces_cpu_optimizer": True,
    "route": Route.ACCELERATE,
}


def _optimizers_alike() -> dict[tuple[OptimizerRow, ...], list[str]]:
    """Return the ids of the optimizers that fare alike in every column, by their rows."""
    alike: dict[tuple[OptimizerRow, ...], list[str]] = defaultdict(list)
    for optimizer in OPTIMIZERS:
        rows = (verdict(optimizer, **{**_DEFAULT, **placed}) for placed in _PLACEMENTS.values())
        alike[tuple(rows)].append(optimizer)
    return alike


_PREDICTIONS_HEAD = """\
<!-- Written by `make docs` from benchmarks/measured/published.json, which `make bench-published` writes. -->
# Predictions of published runs

Peaks of GPU memory that others measured and published, and what this version predicts of them. Nothing was
fitted to them; versions and conventions are what each source states. Errors are relative, positive where too
much was predicted; ± is the uncertainty that is stated with each prediction.
"""
_ERRORS = {
    "median": "median",
    "90th percentile": "90th_percentile",
    "95th percentile": "95th_percentile",
    "worst": "worst",
    "bias": "bias",
    "inside ±": "share_within_uncertainty",
}


_STEPS_HEAD = """
## Times of steps

Times of an optimizer step that others published, predicted over the traces that plans use
(`make bench-published`). A step by which a rate of [rates.toml](../../zerofit/catalog/rates.toml) was chosen
is listed and not counted. A model keeps 0.73 of the rate of the best shapes: on A100 as torchtitan's runs on
H100 say, and on H100 as Qwen's on A100.
"""


def predictions_page(measured: Mapping[str, Any], steps: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        measured: what benchmarks/published.py wrote: a summary by source and kind, and every case.
        steps: the same of benchmarks/published_steps.py, of times.
    """
    cases = [
        f"| {case['id']} | {case['kind']} | {case['measured_bytes'] / GIB:.2f} | "
        f"{case['predicted_bytes'] / GIB:.2f} | {case['error']:+.1%} | {case['uncertainty']:.0%} | "
        f"{case['not_known'] or '-'} |"
        for case in measured["cases"]
        if case["error"] is not None
    ]
    return "\n".join(
        [
            _PREDICTIONS_HEAD,
            *_errors(measured["summary"]),
            "",
            "The last column says what a source does not state: lengths, batches, versions, what was read.",
            "",
            "| case | training | measured, GiB | predicted, GiB | error | ± | not known |",
            "|---|---|---|---|---|---|---|",
            *cases,
            *_left_out(measured["left_out"]),
            _STEPS_HEAD,
            *_errors(steps["summary"]),
            "",
            "| step | training | measured, s | predicted, s | error | ± | decided a rate | not known |",
            "|---|---|---|---|---|---|---|---|",
            *(
                f"| {case['id']} | {case['kind']} | {case['measured_s']:.3f} | {case['predicted_s']:.3f} | "
                f"{case['error']:+.1%} | {case['uncertainty']:.0%} | {case['decided'] or '-'} | "
                f"{case['not_known'] or '-'} |"
                for case in steps["cases"]
            ),
            "",
        ]
    )


def _left_out(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section on what an uncertainty made of the other sources would cover."""
    return [
        _LEFT_OUT_HEAD,
        *(
            f"| {row['source']} | {row['class']} | {row['cases']} | {row['by']} | "
            f"{row['uncertainty_of_others']:.1%} | {row['inside_it']:.0%} | {row['stated']:.0%} | "
            f"{row['inside_stated']:.0%} |"
            for row in rows
        ),
    ]


def _errors(summary: Mapping[str, Any]) -> list[str]:
    """Return the table of errors by source and kind."""
    signed = ("worst", "bias")
    return [
        f"| of | cases | {' | '.join(_ERRORS)} |",
        "|---" * (len(_ERRORS) + 2) + "|",
        *(
            f"| {name} | {group['cases']} | "
            + " | ".join(f"{group[key]:{'+' if key in signed else ''}.1%}" for key in _ERRORS.values())
            + " |"
            for name, group in summary.items()
        ),
    ]


_LEFT_OUT_HEAD = """
## Sources left out

What the 90th percentile of the other sources' errors would cover of each source, and what the stated
uncertainty covers. Cases of the same training and precision are taken where the other sources have five or
more, else cases of the same training, else all.

| source left out | training | cases | the others | their 90th percentile | inside it | stated ± | inside it |
|---|---|---|---|---|---|---|---|"""


_EVIDENCE_HEAD = """\
<!-- Written by `make docs` from tests/evidence/measured/rules.json, which `make evidence` writes. -->
# Evidence for the rules

Each rule's bad example was run, and what it did is what the rule says; its good example was run and ended
well, with the weights of a run without sharding where it trains. "Refused": `zerofit launch --dry-run`, which
captures the script, refuses the bad example and takes the good one. "Documented" means that it was not
reproduced here, for the reason given: the rule's own link is then its evidence.
"""


def evidence_page(measured: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        measured: what the harness wrote: the date, the versions, and a row a rule.
    """
    versions = ", ".join(f"{package} {version}" for package, version in measured["versions"].items())
    rows = measured["rules"]
    num_reproduced = sum(row["verdict"] == "reproduced" for row in rows)
    return "\n".join(
        [
            _EVIDENCE_HEAD,
            f"Measured on {measured['measured_on']} on two CPU ranks over gloo, with {versions}: "
            f"{num_reproduced} of {len(rows)} rules reproduced.",
            "",
            "| rule | a run like its bad example | verdict | what was seen | good example, relative error |",
            "|---|---|---|---|---|",
            *(_evidence_row(row) for row in rows),
            "",
        ]
    )


def _evidence_row(row: Mapping[str, Any]) -> str:
    verdict = "reproduced" if row["verdict"] == "reproduced" else "documented"
    error = f"{row['good_error']:.1g}" if "good_error" in row else ""
    seen = row["seen"].replace("|", "\\|")
    name = row["rule"]
    return f"| [{name}](rules.md#{name}) | {row['outcome']} | {verdict} | {seen} | {error} |"


_OPTIMIZER_HEAD = """\
<!-- Written by `make docs` from zerofit/core/optimizers/table.py: edit the entries there. -->
# Optimizers under ZeRO and offload

What an optimizer trains once DeepSpeed shards or offloads it, against an unsharded fp32 run of the same
optimizer, as the relative error of the weights after five steps. `zerofit check`, `config` and `launch` all
read this table. Ids name where an optimizer comes from; `config.` is DeepSpeed's own optimizer section.
Parameter offload changed no answer; nvme answers as cpu does.

- **ok**: the same weights, to 1e-4.
- **other numbers**: the optimizer that was asked for runs, and shards change what it computes.
- **WRONG**: another optimizer runs, and nothing says so.
- **refused**: the run ends in an error.
- **?**: not measured, and nothing in the libraries decides it.

A star marks what a CPU can't run, and the libraries' source decides.
"""
_ANSWERS = {
    OptimizerAnswer.ALLOWED: "ok",
    OptimizerAnswer.DIFFERENT: "other numbers",
    OptimizerAnswer.WRONG: "**WRONG**",
    OptimizerAnswer.REFUSED: "refused",
    OptimizerAnswer.UNKNOWN: "?",
}


def optimizer_page(measured: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        measured: what the harness wrote: the date, the versions, the machine, and the cases.
    """
    versions = ", ".join(f"{package} {version}" for package, version in measured["versions"].items())
    notes: dict[str, int] = {}
    table = [
        "| optimizers | " + " | ".join(_title(title) for title in _PLACEMENTS) + " |",
        "|---" * (len(_PLACEMENTS) + 1) + "|",
    ]
    for rows, optimizers in _optimizers_alike().items():
        names = ", ".join(f"`{name}`" for name in optimizers)
        table.append(f"| {names} | " + " | ".join(_answer(row, notes) for row in rows) + " |")
    reasons = [f"{number}. {text}" for text, number in notes.items()]
    cases = f"{len(measured['cases'])} cases on {measured['machine']}"
    run = f"Measured on {measured['date']}: {cases}, with {versions}."
    run += " `make evidence` runs them anew."
    return "\n".join([_OPTIMIZER_HEAD, *table, "", "Why:", "", *reasons, "", run, *_optimizer_states(), ""])


_STATES_HEAD = """
## Names and states

What each optimizer keeps on the GPU for P trained elements of b bytes each, with its default options. Where
it says "traced", a plan of your script runs the real `step()` on tensors without values, and counts what it
makes. ZeRO divides the states over the ranks. `--optimizer` names those that zerofit can put in place of a
script's own.

| optimizer | `optim` of Trainer | `--optimizer` | states | source |
|---|---|---|---|---|"""


def _optimizer_states() -> list[str]:
    """Return the table of names and states."""
    return [
        _STATES_HEAD,
        *(_states_row(entry) for entry in ENTRIES if entry.library != "config" and not entry.needs_closure),
    ]


def _states_row(entry: OptimizerEntry) -> str:
    new = entry.replacement
    memory = entry.memory if new is None else new.memory
    trainer = ", ".join(f"`{name}`" for name in entry.trainer)
    states = memory.formula if memory is not None else ""
    if not entry.is_exact or memory is None:
        states = f"{states}; traced".removeprefix("; ")
    source = memory.source if memory is not None else ""
    return f"| `{entry.id}` | {trainer} | {f'`{new.name}`' if new else ''} | {states} | {source} |"


def _title(title: str) -> str:
    """Return a column's title, its keys as code."""
    words = title.split(", ")
    return ", ".join(f"`{word}`" if ":" in word or "(" in word else word for word in words)


def _answer(row: OptimizerRow, notes: dict[str, int]) -> str:
    number = notes.setdefault(row.cause.value, len(notes) + 1)
    star = "*" if row.not_run else ""
    return f"{_ANSWERS[row.answer]}{star}{_error(row)} ({number})"


def _error(row: OptimizerRow) -> str:
    if row.error is None:
        return ""
    least, most = row.error
    return f" {least:.2g}" if f"{least:.2g}" == f"{most:.2g}" else f" {least:.2g} to {most:.2g}"


_VERSIONS_HEAD = """\
<!-- Written by `make docs` from zerofit/core/supported.py and from what `make test-versions` showed. -->
# Versions

`zerofit launch`, `generate` and `bench`, and every capture of a script, refuse a library outside of its range
before anything starts, and say so of a release that is newer than all that were tested. `zerofit plan` and
`config` refuse the libraries that trace a model. `zerofit check`, and `zerofit plan --fast` of a model of
the catalog, import none of them and work beside any; the keys that `zerofit check` knows are those of the
installed releases, or of the newest ones where none is installed.

| package | supported | newest tested |
|---|---|---|"""
_SMOKE = """
Why not older ones:

- **DeepSpeed 0.17.6 to 0.18.2** overwrite the gradients of all but the last micro-batch of an accumulation
  window under ZeRO-1 and 2, in silence (`runtime/zero/stage_1_and_2.py`), and before 0.18.3 the engine has no
  hooks for a script's own `loss.backward()`, which zerofit trains under.
- **transformers 4** needs huggingface_hub below 1, loads weights in fp32 unless told otherwise, and has other
  private functions in nearly every place that a capture stands in for: each would be a second way to do it.

On CPU ranks, DeepSpeed 0.18.3 to 0.19.0 (later ones up to 0.19.7 were not looked at) may use weights of
ZeRO-3 before they have come: it waits for the last of several gathers alone, which is enough on GPUs. zerofit
waits for all.

With transformers 5.0 and torch 2.8, experts run one by one, which can't be traced: `zerofit plan` of such a
model says so, and plans with `--fast`.

## What was run

`make test-versions` makes an environment of each set of versions in [versions/](../../versions), runs the
smoke tests of [tests/versions](../../tests/versions) there, on two CPU ranks, and keeps what they showed.
`make test-versions SETS="oldest newest"` names some of the sets.
"""


def versions_page(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page.

    Args:
        measured: what the smoke tests wrote, by set: the date, the versions, and a row a check.
    """
    ranges = [
        f"| {one.package} | `{one.specifier}` | {one.tested} |" for one in (PYTHON, *SUPPORTED.values())
    ]
    return "\n".join([_VERSIONS_HEAD, *ranges, _SMOKE, *_table(measured), *_peaks(measured), ""])


_EDITS_HEAD = """\
<!-- Written by `make docs` from tests/evidence/measured/edits.json. -->
# Scripts that edit weights and gradients by hand

Each row is one kind of edit in an otherwise plain loop of eight steps
([edits.py](../../tests/semantics/scripts/edits.py)), trained by itself and by `zerofit launch` on real
engines on CPU ranks. A number is the distance between both final weights, as a share of the way that training
took (2-norms). In fp32 up to 2e-5 counts as equal. A word is the error by which zerofit refuses the training,
before the first step that would differ.

- ZeRO-3 keeps small weights whole, all of them in "z3"; in "z3-sharded" one has 160,000 elements, and is not.
- "split": one process, each batch in two micro-batches; the others: two ranks, half of the batch each.
- "fsdp2": two ranks, each weight sharded over both; measured in fp32.
- In bf16, ZeRO computes in bf16 throughout and accelerate's DDP in autocast: compare a row with the row
  `nothing`, which edits nothing.
"""
_EDIT_PRECISIONS = {"no": "fp32", "bf16": "bf16"}
_EDIT_LAYOUTS = ("split", "ddp", "fsdp2", "z1", "z2", "z3", "z3-sharded", "z3-offload")


def edits_page(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page.

    Args:
        measured: by "edit, layout, precision", the error that refused the training, or the distance.
    """
    edits = dict.fromkeys(key.split(", ")[0] for key in measured)
    lines = [_EDITS_HEAD]
    for precision, title in _EDIT_PRECISIONS.items():
        lines += [
            f"## {title}\n",
            f"| edit | {' | '.join(_EDIT_LAYOUTS)} |",
            f"|{'---|' * (len(_EDIT_LAYOUTS) + 1)}",
        ]
        for edit in edits:
            cells = (_edit_cell(measured.get(f"{edit}, {layout}, {precision}")) for layout in _EDIT_LAYOUTS)
            lines.append(f"| {edit} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


_PROGRAMS_HEAD = """\
<!-- Written by `make docs` from tests/evidence/measured/accelerate_programs.json. -->
# accelerate's own test programs

The programs of `accelerate.test_utils.scripts`, run by `accelerate launch` and by `zerofit launch` with the
same number of CPU ranks and `--engine native` (`make accelerate-programs`). A number is the exit code; some
fail under both for want of a package or of the Hub.

| program | ranks | accelerate launch | zerofit launch | ends the same |
|---|---|---|---|---|
"""


def programs_page(measured: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        measured: by "program, ranks", the exit code under each launcher, and why they differ if they do.
    """
    rows = []
    for key, row in measured["programs"].items():
        program, ranks = key.split(", ")
        same = "yes" if bool(row["accelerate"]) == bool(row["zerofit"]) else f"no: {row['why']}"
        rows.append(f"| {program} | {ranks} | {row['accelerate']} | {row['zerofit']} | {same} |\n")
    return _PROGRAMS_HEAD + "".join(rows) + f"\naccelerate {measured['accelerate']}.\n"


def _edit_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    return f"`{row['refused']}`" if row["refused"] else f"{row['distance']:.0e}"


_MEMORY = """
## What differs in memory

Memory is read off a trace of the installed libraries' own code, and off what DeepSpeed's engine is known
to hold; each library's version is part of the estimate. Below is the peak of one step of a tiny model, in
KiB, as PyTorch's CPU allocator counted it with each set ([test](../../tests/versions/test_memory.py)); the
trace made with the same set is within 3 % of it. What makes the differences:

- **Grouped heads**: torch 2.8's fused attention for CPUs takes no fewer keys than queries, and the scores are
  whole there. Plans are for GPUs, where it is fused with each set.
- **Gemma 2's attention**: transformers 5.0 and 5.17 take PyTorch's, which caps no scores; 5.23 takes its own,
  which keeps the capped ones.
- **T5 under checkpointing**: transformers 5.0 with torch 2.8 holds 7 % more than 5.17 with torch 2.11; which
  of the two it is, was not looked for.
- **LabelSmoother**: since a release after 5.0, `Trainer` has it divide by the tokens of the window; its
  tensors are the same.
- **Layers dropped by chance** (`layerdrop`): in 5.0 Whisper draws its number where nothing is to be dropped,
  too. A trace drops none.
- **Offload's host memory**: `pin_memory` is off by default in DeepSpeed 0.18.3, on in 0.19.8 (read in its
  code). zerofit writes it into every file; one without the key differs.
- **Offload's time**: in DeepSpeed 0.18.3 the host waits for stage 3's gradients to come down in fp32, in
  0.19.8 they come beside the backward pass (read in its code).
"""


def _peaks(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what differs in memory, with the table of peaks by check and set; nothing where none is kept."""
    found = {
        name: {_check_name(row["check"]): row["peak_bytes"] for row in kept["checks"] if "peak_bytes" in row}
        for name, kept in measured.items()
    }
    checks = dict.fromkeys(check for peaks in found.values() for check in peaks)
    if not checks:
        return []
    rows = [
        ["", *found],
        ["---"] * (len(found) + 1),
        *(
            [
                check,
                *(f"{peaks[check] / 1024:.0f}" if check in peaks else "not run" for peaks in found.values()),
            ]
            for check in checks
        ),
    ]
    return [_MEMORY, *(f"| {' | '.join(row)} |" for row in rows)]


def _table(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    packages = ("python", *SUPPORTED)
    checks = dict.fromkeys(
        row["check"] for kept in measured.values() for row in kept["checks"] if "peak_bytes" not in row
    )
    rows = [
        ["", *measured],
        ["---"] * (len(measured) + 1),
        *(
            [package, *(kept["versions"][package] or "none" for kept in measured.values())]
            for package in packages
        ),
        *([_check_name(check), *(_cell(kept, check) for kept in measured.values())] for check in checks),
        ["measured on", *(kept["measured_on"] for kept in measured.values())],
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def _check_name(check: str) -> str:
    """Return "example on two ranks: Trainer, ZeRO-3" of "example on two ranks[Trainer-ZeRO-3]"."""
    what, _, case = check.rstrip("]").partition("[")
    return f"{what}: {case.replace('-', ', ', 1)}" if case else what


def _cell(kept: Mapping[str, Any], check: str) -> str:
    row = next((row for row in kept["checks"] if row["check"] == check), None)
    if row is None:
        return "not run"
    return f"passed, {row['seconds']} s" if row["passed"] else "**failed**"
