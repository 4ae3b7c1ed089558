#!/usr/bin/env python3
"""20,000 damaged configurations through `zerofit check`: each must end in findings or a clear refusal.

Damage is of two kinds: to the text (bits, cuts, brackets, odd characters), and to the tree (values of other
types, misspelt, moved and repeated keys), as the first seldom leaves a document that can be read. Hypothesis
draws them; with the same seed and versions the same documents come again. A traceback ends the run and shows
its document.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from mutations import HJSON, JSON, YAML, mutate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "checking" / "rules"))

from rule_examples import EXAMPLES
from rule_examples.example import ACCELERATE_FILE, DEEPSPEED_FILE, example_files

from zerofit import __version__
from zerofit.checking.check_run import verdict_of
from zerofit.checking.fix_files import find_fixes
from zerofit.checking.read_targets import read_targets
from zerofit.checking.report import Report
from zerofit.checking.rules import ALL_RULES
from zerofit.cli.output.findings_json import findings_json
from zerofit.cli.output.sarif import sarif
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.core.command import Route
from zerofit.core.errors import UserError
from zerofit.machine.versions import probe_versions

SEED = 20261121
MEASURED = Path(__file__).parent / "measured" / "fuzz_check.json"
_SCHEMAS = load_schemas()
_VERSIONS = probe_versions()
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 4, 2.5, 1e30, 10**400, "", "auto", "true", "8", "cpu", "nvme", "none"),
    *(
        [],
        [1],
        {},
        {"enabled": True},
        {"device": "cpu"},
        {"stage": 3},
        {"type": "AdamW"},
        "x" * 3000,
        "\x1b[31m",
    ),
)


def _texts() -> list[tuple[str, str]]:
    """Return (suffix, text) of the presets, of every file of every rule's examples, and of some samples."""
    presets = Path(__file__).parents[1] / "ds_configs"
    files = {(path.suffix, path.read_text("utf-8")) for path in presets.iterdir() if path.suffix != ".md"}
    for rule in ALL_RULES:
        for example in (EXAMPLES[rule.id].bad, EXAMPLES[rule.id].good):
            texts = example_files(example)
            files |= {
                (Path(name).suffix, texts[name])
                for name in (DEEPSPEED_FILE, ACCELERATE_FILE)
                if name in texts
            }
    return sorted(files | {(".json", JSON), (".json", HJSON), (".yaml", YAML)})


def _damage_tree(suffix: str, text: str, random: Random) -> str:
    """Return the document with a few nodes changed; damaged as a text where it is no document."""
    try:
        tree = json.loads(text) if suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return mutate(text, random)
    for _ in range(random.randint(1, 4)):
        _damage_node(tree, random)
    return json.dumps(tree, indent=random.choice((None, 2))) if suffix == ".json" else yaml.safe_dump(tree)


def _damage_node(node: Any, random: Random) -> None:
    """Go down some way in a tree, and change what is there."""
    if not isinstance(node, dict) or not node:
        return
    key = random.choice(sorted(node))
    if isinstance(node[key], dict) and random.random() < 0.7:
        _damage_node(node[key], random)
        return
    match random.randrange(4):
        case 0 | 1:
            node[key] = deepcopy(random.choice(_VALUES))
        case 2:
            node[mutate(key, random, most=1).encode("utf-8", "replace").decode()] = node.pop(key)
        case 3:
            node[random.choice(sorted(node))] = deepcopy(node[key])


@dataclass
class _Tally:
    """What came out so far."""

    ends: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0


def check_text(path: Path, route: Route | None, tally: _Tally) -> None:
    """Check one file as the command does, with every output and every fix."""

    def look(overlay: Any) -> Report:
        targets = read_targets((str(path),), schemas=_SCHEMAS, stdin=lambda: b"", overlay=overlay)
        targets = replace(targets, route=route, versions=_VERSIONS, num_processes=2)
        return Report(targets=targets, verdict=verdict_of(targets))

    started = time.perf_counter()
    try:
        checked = look({})
        verdict, files = checked.verdict, checked.targets.files
        str(checked)
        json.loads(findings_json(verdict, files=files, num_rules=len(ALL_RULES)))
        json.loads(sarif(verdict, files=files, rules=ALL_RULES, version=__version__))
        tally.rules.update({finding.rule for finding in verdict.findings})
        tally.ends["findings" if verdict.findings else "clean"] += 1
        find_fixes(look)
    except UserError as error:
        tally.ends[f"refused: {error.rule}"] += 1
    except ExceptionGroup as group:
        known, others = group.split(UserError)
        if others is not None or known is None:
            raise
        rules = {error.rule for error in known.exceptions if isinstance(error, UserError)}
        tally.ends[f"refused: {', '.join(sorted(rules))}"] += 1
    tally.slowest_s = max(tally.slowest_s, time.perf_counter() - started)


def run(num_documents: int, *, seed_number: int) -> _Tally:
    """Check this many damaged documents; an exception that is no refusal ends it, with the document."""
    texts, tally = _texts(), _Tally()
    folder = Path(tempfile.mkdtemp(prefix="zerofit-fuzz-"))

    @seed(seed_number)
    @settings(
        max_examples=num_documents,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.sampled_from(texts),
        st.booleans(),
        st.sampled_from((None, *Route)),
        st.integers(min_value=0, max_value=2**32 - 1),
    )
    def check_one(file: tuple[str, str], damages_tree: bool, route: Route | None, number: int) -> None:
        suffix, text = file
        random = Random(number)
        damaged = _damage_tree(suffix, text, random) if damages_tree else mutate(text, random)
        path = folder / f"config{suffix}"
        path.write_text(damaged, encoding="utf-8", errors="surrogatepass", newline="")
        check_text(path, route, tally)

    check_one()
    (folder / "config.json").unlink(missing_ok=True)
    (folder / "config.yaml").unlink(missing_ok=True)
    folder.rmdir()
    return tally


def main() -> int:
    """Run, and write what came out to benchmarks/measured/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=MEASURED)
    arguments = parser.parse_args()
    started = time.perf_counter()
    tally = run(arguments.documents, seed_number=arguments.seed)
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "documents": sum(tally.ends.values()),
        "seed": arguments.seed,
        "versions": {"zerofit": __version__, "python": sys.version.split()[0]},
        "ends": dict(tally.ends.most_common()),
        "rules_that_found_something": len(tally.rules),
        "slowest_ms": round(tally.slowest_s * 1000),
        "seconds": round(time.perf_counter() - started),
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
