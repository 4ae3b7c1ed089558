"""`zerofit generate` with the bad inputs that its issue names: the message, exit code 2, no file changed.

tests/cli has the other mistakes: messages/generate.txt those that are found before transformers is imported,
generate_mistakes.txt those that are found after it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from generate_runs import NUM_POSITIONS, make_model, write_prompts
from runs import RUN_TIMEOUT_S, SCRIPTS, environment

if TYPE_CHECKING:
    from pathlib import Path

GIVEN = {"--model": "model", "--prompts": "prompts.jsonl", "--out": "out.jsonl", "--max-new-tokens": "8"}

UNREADABLE = """\
error[prompts-unreadable]: the file of prompts can't be read
  found: --prompts {found}
  why:   it is read before anything starts
  fix:   {fix}
"""

AT_ONCE = {
    "an empty file": (
        {"--prompts": "empty.jsonl"},
        "error[prompts-empty]: there is no prompt\n"
        "  found: empty.jsonl: it is empty\n"
        "  why:   there is nothing to generate from\n"
        "  fix:   name a file with one prompt a line\n",
    ),
    "invalid JSON on line 7": (
        {"--prompts": "seven.jsonl"},
        "error[prompts-broken]: the file of prompts has lines that are no prompts\n"
        "  found: seven.jsonl: line 7: invalid JSON: Expecting ',' delimiter at column 16\n"
        '  why:   a line of JSONL is a string, or an object with "prompt" or "messages"\n'
        "  fix:   mend the lines, or give a file of plain text, one prompt a line, the ending .txt\n",
    ),
    "a file that can't be opened": (
        {"--prompts": "loop.jsonl"},
        UNREADABLE.format(
            found="loop.jsonl: Too many levels of symbolic links", fix="name a file with one prompt a line"
        ),
    ),
    "a folder of prompts": (
        {"--prompts": "folder"},
        UNREADABLE.format(found="folder: Is a directory", fix="name a file with one prompt a line"),
    ),
    "a model without weights": (
        {"--model": "no_weights"},
        "error[model-folder-without-weights]: the model's folder has no weights\n"
        "  found: --model no_weights, with config.json, generation_config.json, tokenizer.json, "
        "tokenizer_config.json in it\n"
        "  why:   they stand in model.safetensors or pytorch_model.bin, or in shards with an index beside "
        "them\n"
        "  fix:   name the folder that save_pretrained wrote; of a ZeRO checkpoint make one with "
        "zero_to_fp32.py\n",
    ),
    "a model without tokenizer": (
        {"--model": "no_tokenizer"},
        "error[tokenizer-missing]: there is no tokenizer\n"
        "  found: --model no_tokenizer, without one beside it\n"
        "  why:   it makes tokens of the prompts, and text of what the model makes\n"
        "  fix:   --tokenizer DIR names a folder that tokenizer.save_pretrained() wrote, or a cached "
        "hub id\n",
    ),
    "no such model": (
        {"--model": "nobody/nothing"},
        "error[model-unknown]: no such model\n"
        "  found: --model nobody/nothing: no folder, none of the {num_models} models of the catalog, not in "
        "the hub's cache\n"
        "  why:   HF_HUB_OFFLINE is set, so the hub was not asked\n"
        "  fix:   name a folder with a config.json, or a hub id while the hub can be reached\n",
    ),
    "a temperature that is no number": (
        {"--temperature": "nan"},
        "error[bad-value]: --temperature can't be 'nan'\n"
        "  found: --temperature nan\n"
        "  why:   it is a number of at least 0\n"
        "  fix:   see zerofit generate --help\n",
    ),
}
"""What is refused before transformers is imported."""
LATER = {
    "a prompt that is too long": (
        {"--prompts": "long.jsonl"},
        "error[prompt-too-long]: prompts are longer than the model's positions\n"
        "  found: line 2: {num_long} tokens\n"
        f"  why:   the model has {NUM_POSITIONS} positions, and fails or writes nonsense beyond them; one at "
        "least is for the completion\n"
        f"  fix:   shorten them to {NUM_POSITIONS - 1} tokens, or leave them out\n",
    ),
    "unfinished results of other prompts": (
        {"--out": "begun.jsonl"},
        "error[generate-other-parts]: the unfinished results there are those of another run\n"
        "  found: {folder}/begun.jsonl.parts: they were made with another model, other prompts or other "
        "settings\n"
        "  why:   a file would get results of two kinds\n"
        "  fix:   write the results to another file, or, if you don't need the unfinished ones: "
        "rm -r {folder}/begun.jsonl.parts\n",
    ),
}
"""What is refused with the tokenizer, and the last one when the plan has been shown."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the command lines name."""
    folder = tmp_path_factory.mktemp("inputs")
    make_model(folder / "model")
    _break_models(folder)
    texts = {
        "empty.jsonl": "",
        "seven.jsonl": '"a"\n' * 6 + '{"prompt": "b" "c"}\n"d"\n',
        "begun.jsonl.parts/job.json": '{"version": 1, "fingerprint": "other"}\n',
        "begun.jsonl.parts/start1-rank0.jsonl": '{"index": 0}\n',
    }
    (folder / "begun.jsonl.parts").mkdir()
    (folder / "folder").mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "loop.jsonl").symlink_to("loop.jsonl")
    write_prompts(folder / "prompts.jsonl", [{"prompt": "the cat"}, {"prompt": "sat"}])
    write_prompts(folder / "long.jsonl", [{"prompt": "the cat"}, {"prompt": "the cat sat " * 40}])
    return folder


def _break_models(folder: Path) -> None:
    broken = {
        name: shutil.copytree(folder / "model", folder / name) for name in ("no_weights", "no_tokenizer")
    }
    (broken["no_weights"] / "model.safetensors").unlink()
    for path in broken["no_tokenizer"].glob("tokenizer*"):
        path.unlink()


def _tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """How each command line ended; all of them are run one after the other, and leave the folder as it is."""
    before = _tree(folder)
    cases = AT_ONCE | LATER
    lines = [
        ["generate", "--cpu", *(word for flag in (GIVEN | given).items() for word in flag)]
        for given, _ in cases.values()
    ]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "many_command_lines.py")],
        cwd=folder,
        env=environment(),
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert _tree(folder) == before
    return dict(zip(cases, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def numbers(folder: Path) -> dict[str, object]:
    """What messages say of this model and its tokenizer."""
    from transformers import AutoTokenizer

    from zerofit.models.catalog import catalog_models

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    return {
        "folder": folder,
        "num_long": len(tokenizer("the cat sat " * 40)["input_ids"]),
        "num_models": len(catalog_models()),
    }


@pytest.mark.parametrize("name", AT_ONCE | LATER)
def test_a_bad_input_is_named_and_nothing_is_written(
    name: str, outcomes: dict[str, dict[str, Any]], numbers: dict[str, object]
) -> None:
    _, message = (AT_ONCE | LATER)[name]
    outcome = outcomes[name]
    plan, _, error = outcome["stderr"].partition("error")
    assert f"error{error}" == message.format(**numbers)
    assert plan.startswith("model: GPT2LMHeadModel") if name == list(LATER)[-1] else plan == ""
    assert outcome["stdout"] == ""
    assert outcome["exit_code"] == 2


@pytest.mark.parametrize("name", AT_ONCE)
def test_what_needs_no_tokenizer_is_said_before_seconds_of_imports(
    name: str, outcomes: dict[str, dict[str, Any]]
) -> None:
    assert outcomes[name]["imported"] == []
