"""A verdict with one of everything, for the tests of what is printed of it."""

from __future__ import annotations

from zerofit.checking.engine import Finding, UndecidedRule, Verdict
from zerofit.checking.rule import Severity
from zerofit.checking.targets import TargetFile
from zerofit.configs.document import FileKind, RemoveKey, RenameKey, SetValue
from zerofit.configs.text.read import read_document
from zerofit.core.errors import Unreadable
from zerofit.core.setting import Confidence, Place, Said

DEEPSPEED_TEXT = '{\n  "zero_optimisation": {"stage": 2},\n  "amp": {},\n  "bf16": {"enabled": false}\n}\n'
_NAMES_IT = Said(
    value="conf/my ds.json",
    text="deepspeed_config_file: conf/my ds.json",
    place=Place(file="acc.yaml", line=2, column=3),
)
FILES = (
    TargetFile(
        name="acc.yaml",
        kind=FileKind.ACCELERATE,
        document=read_document("distributed_type: DEEPSPEED\n", name="acc.yaml"),
    ),
    TargetFile(
        name="conf/my ds.json",
        kind=FileKind.DEEPSPEED,
        document=read_document(DEEPSPEED_TEXT, name="conf/my ds.json"),
        named_by=_NAMES_IT,
    ),
    TargetFile(
        name="/src/train.py",
        kind=FileKind.SCRIPT,
        broken=Unreadable("the file is cut off", "a bracket is open", "close it"),
    ),
)
_DS = "conf/my ds.json"


def _finding(**changes: object) -> Finding:
    fields: dict[str, object] = {
        "rule": "flags-disagree",
        "severity": Severity.ERROR,
        "confidence": Confidence.CERTAIN,
        "summary": "two flags disagree",
        "found": "--zero_stage 3 with --offload 2",
        "why": "only one of them counts",
        "fix": "take one of them out",
        "see": "https://example.org/flags",
        "place": None,
        "edits": (),
    }
    return Finding(**{**fields, **changes})  # type: ignore[arg-type]


VERDICT = Verdict(
    findings=(
        _finding(),
        _finding(
            rule="key-misspelt",
            found="zero_optimisation",
            place=Place(file=_DS, line=2, column=3),
            edits=(RenameKey(document=_DS, path=("zero_optimisation",), key="zero_optimization"),),
        ),
        _finding(
            rule="key-removed",
            severity=Severity.WARNING,
            found="amp and bf16.enabled=false",
            place=Place(file=_DS, line=3, column=3),
            edits=(
                RemoveKey(document=_DS, path=("amp",)),
                SetValue(document=_DS, path=("bf16", "enabled"), value=True),
            ),
        ),
        _finding(
            rule="rank-0-alone",
            severity=Severity.WARNING,
            confidence=Confidence.LIKELY,
            found="model.generate() under is_main_process",
            place=Place(file="/src/train.py", line=31, column=9),
        ),
        _finding(
            rule="slow",
            severity=Severity.ADVICE,
            found="pin_memory=false",
            place=Place(file=_DS, line=4, column=3),
        ),
    ),
    unknown=(
        UndecidedRule(rule="offload-needs-adam", fact="the optimizer, which the script creates"),
        UndecidedRule(rule="bf16-needs-ampere", fact="the GPUs that will run it"),
        UndecidedRule(rule="muon-needs-matrices", fact="the optimizer, which the script creates"),
    ),
)
