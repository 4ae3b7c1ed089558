"""What was seen when the rules' examples were run, as a page of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_HEAD = """\
<!-- Written by `make docs` from tests/evidence/measured/rules.json, which `make evidence` writes. -->
# Evidence for the rules

Each rule's bad example was run, and what it did is what the rule says; its good example was run and ended
well, with the weights of a run without sharding where it trains. "Documented" means that it was not
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
            _HEAD,
            f"Measured on {measured['measured_on']} on two CPU ranks over gloo, with {versions}: "
            f"{num_reproduced} of {len(rows)} rules reproduced.",
            "",
            "| rule | a run like its bad example | verdict | what was seen | good example, relative error |",
            "|---|---|---|---|---|",
            *(_row(row) for row in rows),
            "",
        ]
    )


def _row(row: Mapping[str, Any]) -> str:
    verdict = "reproduced" if row["verdict"] == "reproduced" else "documented"
    error = f"{row['good_error']:.1g}" if "good_error" in row else ""
    seen = row["seen"].replace("|", "\\|")
    name = row["rule"]
    return f"| [{name}](rules.md#{name}) | {row['outcome']} | {verdict} | {seen} | {error} |"
