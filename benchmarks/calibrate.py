"""Print what measurements on a GPU say for zerofit's catalog; with --write, put it there.

    python benchmarks/calibrate.py benchmarks/measured/nvidia-h200.json
    python benchmarks/calibrate.py --write benchmarks/measured/nvidia-h200.json

stdout is TOML, each entry below a comment with what the catalog says now; the rest goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_truth.calibration import CatalogFacts, catalog_facts
from gpu_truth.catalog_text import context_lines, rate_block, with_context, with_rate
from gpu_truth.results import results_from_json

from zerofit.core.atomic_file import write_whole
from zerofit.core.errors import UserError
from zerofit.machine.gpu_catalog import read_gpus
from zerofit.machine.rates import read_rates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.facts import GpuSpec
    from zerofit.core.rates import Rate, Rates
    from zerofit.machine.gpu_catalog import CatalogGpu

_ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(description="What measurements on a GPU say for zerofit's catalog.")
    parser.add_argument("file", type=Path, help="what measure_gpu.py wrote, in benchmarks/measured/")
    parser.add_argument("--write", action="store_true", help="put it into the catalog")
    catalog = _ROOT / "zerofit" / "catalog"
    parser.add_argument("--catalog", type=Path, default=catalog, help="folder of gpus.toml and rates.toml")
    options = parser.parse_args(arguments)
    try:
        results = results_from_json(options.file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{options.file}: {error}", file=sys.stderr)
        return 2
    try:
        gpus, present = _catalog(options.catalog)
        facts = catalog_facts(results, gpus=gpus, cited_as=_cited(options.file))
        print("\n".join(_entries(facts, present)), end="")
        _tell(facts)
        if options.write:
            write(facts, catalog=options.catalog)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _catalog(folder: Path) -> tuple[tuple[CatalogGpu, ...], Rates]:
    """Return the GPUs and rates of a folder.

    Raises:
        UserError: they can't be read.
    """
    try:
        return read_gpus(str(folder / "gpus.toml")), read_rates(str(folder / "rates.toml"))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            "catalog-not-readable",
            f"the catalog can't be read: {error}",
            found=f"--catalog {folder}",
            why="what was measured is compared with its gpus.toml and rates.toml",
            fix="give the folder of both, or leave --catalog out: that is zerofit/catalog of this checkout",
        ) from error


def write(facts: CatalogFacts, *, catalog: Path) -> None:
    """Put facts into the catalog; what they replace goes, and nothing else changes.

    Args:
        facts: of one GPU.
        catalog: the folder of gpus.toml and rates.toml.

    Raises:
        UserError: it can't be written.
    """
    gpus, rates = catalog / "gpus.toml", catalog / "rates.toml"
    gpus_text, rates_text = gpus.read_text(encoding="utf-8"), rates.read_text(encoding="utf-8")
    new_gpus, new_rates = gpus_text, rates_text
    if facts.context_mib is not None:
        new_gpus = with_context(
            gpus_text, facts.gpu.name, context_mib=facts.context_mib, source=facts.context_source
        )
    for rate in facts.rates:
        new_rates = with_rate(new_rates, rate)
    for path, old, new in ((gpus, gpus_text, new_gpus), (rates, rates_text, new_rates)):
        if new != old:
            try:
                write_whole(path, new)
            except OSError as error:
                raise UserError(
                    "catalog-not-written",
                    f"the catalog can't be written: {error}",
                    found=f"--catalog {catalog}",
                    why=f"--write replaces {path.name} there",
                    fix="give a folder that may be written to, or leave --write out",
                ) from error
            print(f"written: {path}", file=sys.stderr)


def _entries(facts: CatalogFacts, present: Rates) -> Iterator[str]:
    """Yield each entry as TOML, below what the catalog says now."""
    name = facts.gpu.name
    if facts.context_mib is not None:
        before, now = facts.present_context_mib, facts.context_mib
        yield f"# gpus.toml: context of {name}, {before} MiB so far, now {now} ({now - before:+} MiB)\n" + (
            f'[[gpu]]\nname = "{name}"\n{context_lines(now, facts.context_source)}'
        )
    for rate in facts.rates:
        yield f"# rates.toml: {_change(rate, present, facts.gpu.spec)}\n{rate_block(rate)}"


def _change(rate: Rate, present: Rates, gpu: GpuSpec) -> str:
    before = present.of(rate.name, gpu.compute_capability, gpu=gpu.name)
    return f"{rate.name}, {before.value:g} so far ({before.basis}), now {rate.value:g}"


def _tell(facts: CatalogFacts) -> None:
    for text in facts.defects:
        print(f"defect: {text}", file=sys.stderr)
    for text in facts.left_out:
        print(f"left out: {text}", file=sys.stderr)


def _cited(file: Path) -> str:
    """Return how a source names a file: from the repository's root on, where it lies there."""
    path = file.resolve()
    return path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name


if __name__ == "__main__":
    sys.exit(main())
