"""The committed table of what was measured: a row a rule, of its present examples or stale."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.plan import Topology, topology_fields
from zerofit.core.strategy import Strategy
from zerofit.machine.versions import probe_versions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rule_examples.example import Examples

    from zerofit.checking.rule import Rule

_LATER = {
    "dp_replicate_size": 1,
    **dict.fromkeys(("shell", "capture", "ranks", "fsdp", "hostfile", "lacks_script")),
    **{
        name: getattr(Strategy(), name)
        for name in ("activation_offload", "reshard_after_forward", "state_dict_type", "quant_storage")
    },
}
"""Fields of an Example and its Strategy that earlier measurements were made without, with their defaults."""
TABLE = Path(__file__).parents[1] / "measured" / "rules.json"


def fingerprint(rule: Rule, examples: Examples) -> str:
    """Return a hash of all that a row is measured of: the rule's examples and its evidence."""
    parts = [_plain(part) for part in (examples.bad, examples.good, rule.evidence)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, Topology):
        return topology_fields(value)  # as in a plan file: a size of 1 is no change of an example
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        # Fields that came later change no example that does not use them.
        return {
            name: plain
            for name, plain in fields.items()
            if name not in _LATER or plain != _plain(_LATER[name])
        }
    if isinstance(value, Enum):
        return _plain(value.value)
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_table() -> dict[str, Any]:
    """Return the table; one without rows where there is none yet."""
    return json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {"rules": []}


def write_table(rows: Mapping[str, Mapping[str, Any]], rules: Iterable[Rule]) -> None:
    """Write new rows beside those of before, without the rows of rules that are gone."""
    all_rows = {row["rule"]: row for row in read_table()["rules"]} | dict(rows)
    versions = dataclasses.asdict(probe_versions())
    document = {
        "measured_on": datetime.now(UTC).date().isoformat(),
        "versions": {name: version for name, version in versions.items() if version is not None},
        "rules": [all_rows[name] for name in sorted(rule.id for rule in rules) if name in all_rows],
    }
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def stale_rows(
    rules: Iterable[Rule], examples: Mapping[str, Examples], table: Mapping[str, Any]
) -> list[str]:
    """Return what the table lacks or holds of examples that have changed since."""
    rows = {row["rule"]: row for row in table["rules"]}
    known = {rule.id: rule for rule in rules}
    complaints = [f"{name}: not measured" for name in sorted(known.keys() - rows.keys())]
    complaints += [f"{name}: no such rule" for name in sorted(rows.keys() - known.keys())]
    changed = (
        name
        for name in known.keys() & rows.keys()
        if rows[name]["of"] != fingerprint(known[name], examples[name])
    )
    return complaints + [f"{name}: its examples or evidence have changed" for name in sorted(changed)]
