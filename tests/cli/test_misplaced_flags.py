"""zerofit's flags after the script are refused if the script does not know them, before anything starts."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from click import Context, Option
from runs import RunZerofit

from zerofit.cli.main import zerofit
from zerofit.core.errors import UserError
from zerofit.launching.misplaced_flags import check_misplaced_flags

_FLAGS = {"--cpu": False, "--dry-run": False, "--zero-stage": True, "--gradient-checkpointing": False}
_KNOWS = {
    "its own parser": 'parser.add_argument("--dry-run", action="store_true")',
    "with underscores": 'parser.add_argument("--dry_run")',
    "an abbreviation": 'parser.add_argument("--dry-run-first")',
    "click": "@click.command()\n@click.option('--dry-run')\ndef main(dry_run): ...",
    "typer": "def main(dry_run: bool = False): ...",
    "a dataclass": "class Arguments:\n    dry_run: bool = False",
    "a module beside it": "from own_arguments import parser",
    "passes them on": "import sys\nsubprocess.run(sys.argv[1:])",
    "fire": "import fire\nfire.Fire(main)",
}


@pytest.mark.parametrize("source", _KNOWS.values(), ids=_KNOWS)
def test_flag_that_the_script_knows_is_its_own(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(source)
    (tmp_path / "own_arguments.py").write_text('parser.add_argument("--dry-run")')
    check_misplaced_flags(
        (str(tmp_path / "train.py"), "--dry-run"), before=("zerofit", "launch"), flags=_FLAGS
    )


def test_field_of_training_arguments_is_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("arguments = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()")
    check_misplaced_flags((str(script), "--gradient_checkpointing"), before=(), flags=_FLAGS)
    with pytest.raises(UserError):
        check_misplaced_flags((str(script), "--dry-run"), before=(), flags=_FLAGS)


_TRL = "from trl import ModelConfig, SFTConfig, TrlParser\nTrlParser((SFTConfig, ModelConfig))"


def test_field_of_trls_dataclasses_is_the_scripts(tmp_path: Path) -> None:
    """As in `trl/scripts/sft.py --use_peft --lora_dropout 0`; the script has none of these names itself."""
    script = tmp_path / "sft.py"
    script.write_text(_TRL)
    fields = {name for file in ("model_config", "sft_config") for name in _fields_of_trl(file)}
    shared = [name for name in _flags_of("launch") if name.lstrip("-").replace("-", "_") in fields]
    assert {"--dtype", "--lora-dropout"} <= set(shared)
    own = tuple(name.replace("-", "_").replace("__", "--", 1) for name in shared)
    check_misplaced_flags((str(script), *own), before=(), flags=_flags_of("launch"))
    with pytest.raises(UserError):
        check_misplaced_flags((str(script), *own, "--zero_stage", "3"), before=(), flags=_flags_of("launch"))


def _fields_of_trl(file: str) -> list[str]:
    """Return the fields of the classes in a file of the installed TRL, whose import takes long."""
    trl = find_spec("trl")
    if trl is None or trl.origin is None:
        pytest.skip("TRL is not installed")
    tree = ast.parse((Path(trl.origin).parent / "trainer" / f"{file}.py").read_text("utf-8"))
    fields = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    return [field.id for field in fields if isinstance(field, ast.Name)]


def _flags_of(verb: str) -> dict[str, bool]:
    command = zerofit.get_command(Context(zerofit), verb)
    assert command is not None
    options = (param for param in command.params if isinstance(param, Option))
    return {name: not option.is_flag for option in options for name in option.opts if name.startswith("--")}


@pytest.mark.parametrize(
    ("line", "flags", "corrected"),
    [
        (
            "launch train.py --epochs 3 --cpu --dry-run --zero_stage 3 x",
            "--cpu, --dry-run, --zero_stage",
            "launch --cpu --dry-run --zero_stage 3 train.py --epochs 3 x",
        ),
        (
            "submit --on slurm train.py --gpus 8xH100 --dry-run",
            "--gpus, --dry-run",
            "submit --on slurm --gpus 8xH100 --dry-run train.py",
        ),
        ("submit train.py --on slurm", "--on", "submit --on slurm train.py"),
        (
            "launch accelerate launch --num_processes 2 train.py --dry-run",
            "--dry-run",
            "launch --num-processes 2 --dry-run train.py",
        ),
        ("tune train.py --dry-run", "--dry-run", "tune --dry-run train.py"),
        ("plan --gpus 1xT4 train.py --why", "--why", "plan --gpus 1xT4 --why train.py"),
    ],
    ids=["launch", "submit", "a required one", "a launcher's line", "tune", "plan"],
)
def test_script_that_ignores_its_arguments_does_not_train(
    run_zerofit: RunZerofit, tmp_path: Path, line: str, flags: str, corrected: str
) -> None:
    (tmp_path / "train.py").write_text("from accelerate import Accelerator\nopen('trained', 'w')\n")
    run = run_zerofit(*line.split(), cwd=tmp_path)
    assert run.returncode == 2
    assert run.stderr == (
        "error[flag-behind-script]: a zerofit flag follows train.py, which does not know it\n"
        f"  found: train.py ... {flags}\n"
        f"  why:   arguments after the script belong to it, but its source has no {flags}\n"
        f"  fix:   zerofit {corrected}\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
