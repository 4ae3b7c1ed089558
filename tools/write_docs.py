"""python -m tools.write_docs: renders the reference pages into docs/ of the current folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.editor_schemas import deepspeed_schema
from tools.fsdp2_page import fsdp2_page
from tools.measured_pages import (
    edits_page,
    evidence_page,
    optimizer_page,
    predictions_page,
    programs_page,
    versions_page,
)
from tools.rules_index import rules_index
from zerofit.checking.rules import ALL_RULES
from zerofit.configs.write.write_files import write_files
from zerofit.core.plan import Plan
from zerofit.core.run_report import RunReport
from zerofit.core.supported import release_of
from zerofit.core.validation import strict_schema

_MEASURED = Path("tests/evidence/measured")


def reference_pages(root: Path) -> dict[Path, str]:
    """Return the text of each page of docs/reference, by its path.

    Args:
        root: the folder of the repository, where what was measured stands.
    """
    measured = root / _MEASURED
    folder = root / "docs" / "reference"
    return {
        folder / "rules.md": rules_index(ALL_RULES),
        folder / "optimizers.md": optimizer_page(
            json.loads((measured / "optimizers.json").read_text("utf-8"))
        ),
        folder / "versions.md": versions_page(_smoke_results(root / "tests" / "versions" / "measured")),
        folder / "predictions.md": predictions_page(
            *(
                json.loads((root / "benchmarks" / "measured" / name).read_text("utf-8"))
                for name in ("published.json", "published_steps.json")
            )
        ),
        folder / "evidence.md": evidence_page(json.loads((measured / "rules.json").read_text("utf-8"))),
        folder / "edits.md": edits_page(json.loads((measured / "edits.json").read_text("utf-8"))),
        folder / "programs.md": programs_page(
            json.loads((measured / "accelerate_programs.json").read_text("utf-8"))
        ),
        folder / "fsdp2.md": fsdp2_page(json.loads((measured / "fsdp2_memory.json").read_text("utf-8"))),
        folder / "plan.schema.json": schema_of(Plan),
        folder / "run-report.schema.json": schema_of(RunReport),
        folder / "ds_config.schema.json": deepspeed_schema(),
    }


def schema_of(kind: type[Any]) -> str:
    """Return the JSON Schema of files that hold a value of this class, as text."""
    schema = strict_schema(kind)
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**dialect, **schema}, indent=1) + "\n"


def _smoke_results(folder: Path) -> dict[str, Any]:
    """Return what the smoke tests wrote of each set, the one with the oldest transformers first."""
    results = {path.stem: json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")}
    return dict(sorted(results.items(), key=lambda item: release_of(item[1]["versions"]["transformers"])))


if __name__ == "__main__":
    write_files(reference_pages(Path()), force=True)
