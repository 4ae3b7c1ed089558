"""zerofit generate up to its start: what a dry run shows, whose unfinished results are continued."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from zerofit.cli.generate import generate
from zerofit.errors import UserError
from zerofit.generation.parts import Parts

_LINE = "--model gpt2 --prompts prompts.jsonl --out out.jsonl --max-new-tokens 8 --cpu"

_RunZerofit = Callable[..., subprocess.CompletedProcess[str]]


def _run(line: str, *more: str, stdin: str | None = None) -> Result:
    arguments = [*line.split(), "--dry-run", *more]
    return CliRunner().invoke(generate, arguments, input=stdin, standalone_mode=False)


def _written(result: Result) -> dict[str, str]:
    """Return the files that a dry run shows, by their names; its last line is the command."""
    if result.exception is not None:
        raise result.exception
    shown, _, _ = result.stdout.rstrip("\n").rpartition("\n")
    parts = re.split(r"^# (/.*)\n", shown, flags=re.MULTILINE)
    return {Path(name).name: text for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def _job(line: str, *more: str, stdin: str | None = None) -> dict[str, Any]:
    job: dict[str, Any] = json.loads(_written(_run(line, *more, stdin=stdin))["generation.json"])
    return job


def _tokens(line: str, *more: str, stdin: str | None = None) -> list[dict[str, Any]]:
    return [
        json.loads(row)
        for row in _written(_run(line, *more, stdin=stdin))["prompts.jsonl"].splitlines()
        if row
    ]


def test_a_dry_run_shows_every_file_and_the_command_and_writes_nothing(generate_folder: Path) -> None:
    before = sorted(generate_folder.rglob("*"))
    result = _run(_LINE)
    assert list(_written(result)) == [
        "prompts.jsonl",
        "generation.json",
        "plan.json",
        "accelerate.yaml",
        "command.sh",
    ]
    command = result.stdout.splitlines()[-1]
    assert command in _written(result)["command.sh"]
    assert "-m zerofit.generation.program" in command
    assert sorted(generate_folder.rglob("*")) == before


def test_a_dry_run_says_what_it_plans_on_stderr(generate_folder: Path) -> None:
    lines = _run(_LINE).stderr.splitlines()
    assert lines[0] == "zerofit: --prompts prompts.jsonl: 1 blank line is left out"
    assert lines[1].startswith("gpt2: GPT2LMHeadModel, ")
    assert lines[-1] == "zerofit: generation: greedy, at most 8 new tokens (--max-new-tokens says so)"


def test_the_job_says_all_that_the_ranks_need(generate_folder: Path) -> None:
    job = _job(_LINE, "--batch-size", "2", "--dtype", "bf16", "--seed", "3", "--top-p", "0.9")
    run = generate_folder / "zerofit-runs"
    assert Path(job["prompts"]).parent.parent == run
    del job["prompts"], job["fingerprint"]
    assert job == {
        "model": str(generate_folder / "gpt2"),
        "tokenizer": str(generate_folder / "gpt2"),
        "out": str(generate_folder / "out.jsonl"),
        "dtype": "bfloat16",
        "batch_size": 2,
        "max_new_tokens": 8,
        "gather": "auto",
        "seed": 3,
        "trust_remote_code": False,
        "deepspeed": None,
        "generation": {"top_p": 0.9, "do_sample": True},
    }


def test_deepspeeds_file_leaves_nothing_to_a_script(generate_folder: Path) -> None:
    files = _written(_run(_LINE, "--zero-stage", "3", "--num-processes", "2", "--param-offload", "cpu"))
    config = json.loads(files["ds_config.json"])
    assert "auto" not in files["ds_config.json"]
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert not {"optimizer", "gradient_clipping", "gradient_accumulation_steps"} & set(config)
    assert Path(json.loads(files["generation.json"])["deepspeed"]).name == "ds_config.json"


@pytest.mark.parametrize(
    ("line", "stdin", "numbers", "first"),
    [
        (_LINE, None, [1, 3], "hello"),
        (_LINE.replace("prompts.jsonl", "prompts.txt"), None, [1, 2], "hello"),
        (_LINE.replace("prompts.jsonl", "-"), '"from stdin"\n', [1], "from stdin"),
        (_LINE + " --chat", None, [1, 3], "user: hello\nassistant: "),
        (_LINE.replace("prompts.jsonl", "chats.jsonl"), None, [1], "user: hi\nassistant: "),
        (_LINE.replace("prompts.jsonl", "chats.jsonl --chat-template t.jinja"), None, [1], "<hi>"),
    ],
)
def test_prompts_become_tokens(
    generate_folder: Path, line: str, stdin: str | None, numbers: list[int], first: str
) -> None:
    from transformers import AutoTokenizer

    (generate_folder / "t.jinja").write_text("<{{ messages[0].content }}>")
    prompts = _tokens(line, stdin=stdin)
    assert [prompt["line"] for prompt in prompts] == numbers
    assert AutoTokenizer.from_pretrained(generate_folder / "gpt2").decode(prompts[0]["tokens"]) == first


@pytest.mark.parametrize(
    ("flags", "file", "generation", "max_new_tokens", "words"),
    [
        ("", {}, {"do_sample": False}, 8, "greedy"),
        (
            "--temperature 0.5",
            {},
            {"temperature": 0.5, "do_sample": True},
            8,
            "sampling with seed 0, temperature 0.5",
        ),
        ("--do-sample", {}, {"do_sample": True}, 8, "sampling with seed 0"),
        ("--num-beams 3", {}, {"num_beams": 3, "do_sample": False}, 8, "3 beams"),
        (
            "--top-k 5",
            {"top_k": 9, "min_p": 0.1, "do_sample": False, "transformers_version": "5", "eos_token_id": 3},
            {"top_k": 5, "min_p": 0.1, "do_sample": True, "eos_token_id": 3},
            8,
            "sampling with seed 0, top_k 5",
        ),
        ("--greedy", {"do_sample": True}, {"do_sample": False}, 8, "greedy"),
        ("", {"max_new_tokens": 5}, {"do_sample": False}, 8, "greedy"),
    ],
)
def test_flags_come_before_the_file(
    generate_folder: Path,
    flags: str,
    file: dict[str, Any],
    generation: dict[str, Any],
    max_new_tokens: int,
    words: str,
) -> None:
    (generate_folder / "settings.json").write_text(json.dumps(file))
    more = [*flags.split(), "--generation-config", "settings.json"]
    job = _job(_LINE, *more)
    assert (job["generation"], job["max_new_tokens"]) == (generation, max_new_tokens)
    last = _run(_LINE, *more).stderr.splitlines()[-1]
    assert last == f"zerofit: generation: {words}, at most 8 new tokens (--max-new-tokens says so)"


@pytest.mark.parametrize(
    ("file", "own", "expected", "by"),
    [
        ({}, {}, 256, "unless --max-new-tokens says otherwise"),
        ({"max_new_tokens": 5}, {"max_new_tokens": 6}, 5, "settings.json says so"),
        ({}, {"max_new_tokens": 6}, 6, "the model's generation_config.json says so"),
    ],
)
def test_where_the_length_comes_from(
    generate_folder: Path,
    generate_models: Path,
    file: dict[str, Any],
    own: dict[str, Any],
    expected: int,
    by: str,
) -> None:
    shutil.copytree(generate_models / "t5", generate_folder / "own")  # T5 has positions for any length
    (generate_folder / "own" / "generation_config.json").write_text(json.dumps(own))
    (generate_folder / "settings.json").write_text(json.dumps(file))
    line = "--model own --prompts prompts.jsonl --out out.jsonl --cpu --generation-config settings.json"
    assert _job(line)["max_new_tokens"] == expected
    assert (
        _run(line).stderr.splitlines()[-1]
        == f"zerofit: generation: greedy, at most {expected} new tokens ({by})"
    )


def test_the_models_own_settings_count_and_are_said(generate_folder: Path, generate_models: Path) -> None:
    shutil.copytree(generate_models / "gpt2", generate_folder / "own")
    (generate_folder / "own" / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.25}'
    )
    line = _LINE.replace("gpt2", "own")
    assert _job(line)["generation"] == {"do_sample": True}
    assert "sampling with seed 0, temperature 0.25" in _run(line).stderr.splitlines()[-1]


_BASE = _LINE + " --do-sample"


@pytest.mark.parametrize(
    ("line", "more", "is_same"),
    [
        (_LINE, "--run-dir elsewhere", True),
        (_LINE, "--zero-stage 3 --num-processes 2", True),
        (_LINE, "--gather never", True),
        (_LINE, "--batch-size 1", True),
        (_LINE, "--seed 1", True),
        (_LINE, "--greedy", True),
        (_LINE, "--do-sample", False),
        (_LINE, "--dtype bf16", False),
        (_LINE, "--max-new-tokens 9", False),
        (_LINE, "--num-beams 2", False),
        (_LINE, "--prompts prompts.txt", False),
        (_LINE, "--chat", False),
        (_LINE, "--model t5", False),
        (_LINE, "--tokenizer t5", False),
        (_BASE, "--num-processes 2 --zero-stage 3 --batch-size 2", True),
        (_BASE, "--batch-size 1", False),
        (_BASE, "--seed 1", False),
        (_BASE, "--temperature 0.5", False),
    ],
)
def test_the_fingerprint_is_of_what_decides_about_the_results(
    generate_folder: Path, line: str, more: str, is_same: bool
) -> None:
    first, second = _job(line)["fingerprint"], _job(line, *more.split())["fingerprint"]
    assert (first == second) is is_same


def test_the_fingerprint_is_of_the_models_files(generate_folder: Path, generate_models: Path) -> None:
    shutil.copytree(generate_models / "gpt2", generate_folder / "own")
    line = _LINE.replace("gpt2", "own")
    first = _job(line)["fingerprint"]
    (generate_folder / "own" / "README.md").write_text("new")
    assert _job(line)["fingerprint"] == first
    (generate_folder / "own" / "model.safetensors").touch()
    assert _job(line)["fingerprint"] != first


def _unfinished(job: dict[str, Any], *, fingerprint: str) -> None:
    """Leave what a killed run leaves that had done the second prompt."""
    completion = {"text": "kept", "finish_reason": "stop", "num_new_tokens": 1, "tokens": [5]}
    with Parts.open(Path(job["out"]), fingerprint=fingerprint, rank=0, world_size=1, resume=True) as parts:
        parts.write([{"index": 1, "num_prompt_tokens": 8, "completions": [completion]}])


def test_unfinished_results_of_another_kind_stop_the_run_before_it_starts(generate_folder: Path) -> None:
    _unfinished(_job(_LINE), fingerprint="other")
    for more, says_batch_size in (([], False), (["--do-sample"], True)):
        result = CliRunner().invoke(generate, [*_LINE.split(), *more], standalone_mode=False)
        assert isinstance(result.exception, UserError)
        assert result.exception.rule == "generate-other-parts"
        assert ("--batch-size" in result.exception.fix) is says_batch_size
    assert not (generate_folder / "zerofit-runs").exists()


def test_one_process_generates_goes_on_where_it_was_killed_and_writes_nothing_over(
    generate_folder: Path, run_zerofit: _RunZerofit
) -> None:
    job = _job(_LINE)
    _unfinished(job, fingerprint=job["fingerprint"])
    finished = run_zerofit("generate", *_LINE.split(), cwd=generate_folder)
    assert (finished.returncode, finished.stdout) == (0, "")
    assert "zerofit: 1 of 2 prompts are done already" in finished.stderr
    assert re.search(
        r"^zerofit: 1 prompt \(of 2; the others were done before\), 8 new tokens in ", finished.stderr, re.M
    )
    lines = _lines(generate_folder / "out.jsonl")
    assert [{**line, "completions": None} for line in lines] == [
        {"prompt": "hello", "completions": None},
        {"prompt": "good day", "id": 7, "completions": None},
    ]
    expected = _greedy(generate_folder / "gpt2", "hello", max_new_tokens=8)
    assert lines[0]["completions"] == [{"text": expected, "finish_reason": "length", "num_new_tokens": 8}]
    assert lines[1]["completions"] == [{"text": "kept", "finish_reason": "stop", "num_new_tokens": 1}]
    (run,) = (generate_folder / "zerofit-runs").iterdir()
    assert json.loads((run / "run.json").read_text())["exit_code"] == 0
    again = CliRunner().invoke(generate, _LINE.split(), standalone_mode=False)
    assert isinstance(again.exception, UserError)
    assert again.exception.rule == "generate-out-exists"


def test_two_ranks_under_zero3_read_stdin_and_write_stdout(
    generate_folder: Path, run_zerofit: _RunZerofit, built_ops: None
) -> None:
    line = "--model t5 --prompts - --out - --max-new-tokens 6 --batch-size 1"
    line += " --cpu --num-processes 2 --zero-stage 3"
    prompts = ["hello", "good day", "a third one"]
    finished = run_zerofit(
        "generate", *line.split(), cwd=generate_folder, stdin="".join(f'"{prompt}"\n' for prompt in prompts)
    )
    assert finished.returncode == 0, finished.stderr
    made = [json.loads(row) for row in finished.stdout.splitlines()]
    assert [(one["prompt"], one["completions"][0]["text"]) for one in made] == [
        (prompt, _greedy(generate_folder / "t5", prompt, max_new_tokens=6)) for prompt in prompts
    ]


def _greedy(folder: Path, prompt: str, *, max_new_tokens: int) -> str:
    """Return what transformers itself makes of a prompt."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    auto_class = AutoModelForSeq2SeqLM if folder.name == "t5" else AutoModelForCausalLM
    model = auto_class.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    found = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)[0]
    begin = 1 if folder.name == "t5" else ids.shape[1]
    text: str = tokenizer.decode(found[begin:], skip_special_tokens=True)
    return text


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text("utf-8").splitlines()]
