"""The rungs of `zerofit bench ladder` as a picture: memory and time of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.cli.draw_plot import save_figure
from zerofit.cli.output.ladder_table import device_words, head_words, state_words
from zerofit.core.units import GIB
from zerofit.launching.trials import predicted_bytes, predicted_step_s
from zerofit.planning.plan_labels import gpus_words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from zerofit.launching.ladder import Ladder

_DPI = 150
_HEIGHT = 0.6
"""Of a rung's bar, where rungs are 1 apart."""


def draw_ladder(ladder: Ladder, path: Path) -> None:
    """Write the picture of a ladder.

    Raises:
        UserError: the file can't be written.
    """
    save_figure(ladder_figure(ladder), path, dpi=_DPI)


def ladder_figure(ladder: Ladder) -> Any:
    """Return a ladder as matplotlib figure."""
    from matplotlib.figure import Figure

    rungs = ladder.rungs
    figure = Figure(figsize=(11.0, 1.9 + 0.5 * len(rungs)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    results = [rung.result for rung in rungs]
    on_cpu = ladder.plan.topology.on_cpu
    used = [result and (result.host_bytes if on_cpu else result.gpu_bytes) for result in results]
    gpus = "" if ladder.predicted_for is None else gpus_words(ladder.predicted_for)
    label = f"predicted for {gpus}" if on_cpu else "predicted"
    _draw(memory, [(result or 0) / GIB for result in used], color="0.55", label="measured")
    _mark(memory, [(number := predicted_bytes(rung.plan)) and number / GIB for rung in rungs], label)
    memory.set_xlabel(
        "GiB of a rank's process at its peak" if on_cpu else "GiB reserved on a GPU at the peak"
    )
    _draw(time, [(result and result.step_time_s) or 0.0 for result in results], color="tab:orange")
    if not on_cpu:
        _mark(time, [predicted_step_s(rung.plan) for rung in rungs], label)
    time.set_xlabel("seconds per step")
    time.tick_params(axis="y", left=False)
    for place, rung in enumerate(rungs):
        memory.text(0, place, f" {state_words(rung)}", va="center", fontsize=8, style="italic")
    memory.set_yticks(range(len(rungs)), [rung.step.label for rung in rungs], fontsize=9)
    memory.invert_yaxis()
    figure.suptitle(
        f"{head_words(ladder)}\n{device_words(ladder)}, torch {ladder.plan.versions.torch}", fontsize=10
    )
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _draw(axes: Any, sizes: Sequence[float], **look: str) -> None:
    """Draw a bar with its number for each rung that was measured."""
    axes.barh(range(len(sizes)), sizes, height=_HEIGHT, **look)
    for place, size in enumerate(sizes):
        if size:
            axes.text(size, place, f" {size:.3g}", va="center", fontsize=8)
    axes.margins(x=0.15)
    axes.set_xlim(left=0)


def _mark(axes: Any, sizes: Sequence[float | None], label: str) -> None:
    """Mark the predictions."""
    known = [(size, place) for place, size in enumerate(sizes) if size]
    if known:
        axes.scatter(*zip(*known, strict=True), marker="|", s=120, color="black", label=label, zorder=3)
