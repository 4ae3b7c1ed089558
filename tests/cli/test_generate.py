"""zerofit generate: what a dry run shows, and what one process and two ranks make of it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dry_runs import LINE as _LINE
from dry_runs import dry_run as _run
from dry_runs import error_of as _error
from dry_runs import job_of as _job
from dry_runs import leave_unfinished as _unfinished
from dry_runs import written as _written
from runs import RunZerofit

from zerofit.cli.generate import generate
from zerofit.core.errors import UserError
from zerofit.launching.generate.model import find_model
from zerofit.launching.generate.prompts import read_prompts_file


def _tokens(line: str, *more: str, stdin: str | None = None) -> list[dict[str, Any]]:
    return [
        json.loads(row)
        for row in _written(_run(line, *more, stdin=stdin))["prompts.jsonl"].splitlines()
        if row
    ]


def test_a_closed_standard_input_is_named(generate_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError) as caught:
        read_prompts_file("-")
    assert caught.value.found == "--prompts -: standard input is closed"


@pytest.mark.parametrize("is_zip", [True, False])
def test_weights_of_torch_save_are_taken(generate_folder: Path, generate_models: Path, is_zip: bool) -> None:
    """As torch has written them since 1.6, and before."""
    import torch

    folder = generate_folder / "saved"
    shutil.copytree(generate_models / "gpt2", folder)
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.zeros(3)}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    assert find_model(str(folder)) == folder


@pytest.mark.parametrize(
    ("content", "damage"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "begins with b'version https://git-lfs"),
        (b"<!doctype html><title>Sign in</title>", "begins with b'<!doctype"),
        (b"PK\x03\x04 and no end", "is cut off"),
        (b'{"message": "Access denied"}', "begins with b'{"),
    ],
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_weights_that_torch_did_not_save_are_incomplete(
    generate_folder: Path, generate_models: Path, content: bytes, damage: str, is_sharded: bool
) -> None:
    folder = generate_folder / "damaged"
    shutil.copytree(generate_models / "gpt2", folder)
    (folder / "model.safetensors").unlink()
    name = "pytorch_model-00001-of-00001.bin" if is_sharded else "pytorch_model.bin"
    (folder / name).write_bytes(content)
    if is_sharded:
        index = {"metadata": {}, "weight_map": {"transformer.wte.weight": name}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError) as caught:
        find_model(str(folder))
    assert caught.value.rule == "model-weights-not-whole"
    assert caught.value.found.startswith(f"{folder / name} {damage}")


@pytest.mark.slow
def test_a_decoder_has_a_position_for_its_start(generate_folder: Path) -> None:
    """So a completion has one less than there are, as the ranks count too."""
    line = _LINE.replace("--model gpt2", "--model bart")
    assert _job(line, "--max-new-tokens", "95")["max_new_tokens"] == 95
    refused = _error(line, "--max-new-tokens", "96")
    assert (refused.rule, refused.found) == (
        "generate-prompt-too-long",
        "the decoder's start has 1 token, and --max-new-tokens 96: 97 together, the model has 96 positions",
    )


def test_a_length_of_the_models_config_is_said_to_be_its(
    generate_folder: Path, generate_models: Path
) -> None:
    """generation_config.json is not there."""
    folder = generate_folder / "short"
    shutil.copytree(generate_models / "t5", folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_new_tokens": 7}))
    line = _LINE.replace("--model gpt2", "--model short").replace("--max-new-tokens 8", "")
    assert "at most 7 new tokens" in _run(line).stderr


def test_numbers_of_a_file_are_those_that_flags_give(generate_folder: Path) -> None:
    """transformers refuses a temperature of 2: it wants 2.0."""
    (generate_folder / "warm.json").write_text('{"do_sample": true, "temperature": 2, "top_k": 5}')
    values = _job(f"{_LINE} --generation-config warm.json")["generation"]
    assert json.dumps(values, sort_keys=True) == '{"do_sample": true, "temperature": 2.0, "top_k": 5}'


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
    written, model, prompts, *_, last = _run(_LINE).stderr.splitlines()
    assert written.startswith("zerofit: a dry run writes none of the files that the command below reads: ")
    assert model.startswith("gpt2: GPT2LMHeadModel, ")
    assert prompts == "2 prompts of at most 8 tokens, at most 8 new ones"
    assert last == "zerofit: generation: greedy, at most 8 new tokens"


def test_the_job_file_has_everything_that_the_ranks_need(generate_folder: Path) -> None:
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
    ("line", "stdin", "number", "first"),
    [
        (_LINE, None, 2, "hello"),
        (_LINE.replace("prompts.jsonl", "prompts.txt"), None, 2, "hello"),
        (_LINE.replace("prompts.jsonl", "-"), '"from stdin"\n', 1, "from stdin"),
        (_LINE + " --chat", None, 2, "user: hello\nassistant: "),
        (_LINE.replace("prompts.jsonl", "chats.jsonl"), None, 1, "user: hi\nassistant: "),
        (_LINE.replace("prompts.jsonl", "chats.jsonl --chat-template t.jinja"), None, 1, "<hi>"),
    ],
)
def test_prompts_become_tokens(
    generate_folder: Path, line: str, stdin: str | None, number: int, first: str
) -> None:
    from transformers import AutoTokenizer

    (generate_folder / "t.jinja").write_text("<{{ messages[0].content }}>")
    prompts = _tokens(line, stdin=stdin)
    assert len(prompts) == number
    assert AutoTokenizer.from_pretrained(generate_folder / "gpt2").decode(prompts[0]["tokens"]) == first


@pytest.mark.parametrize(
    ("flags", "file", "generation", "words"),
    [
        ("", {}, {}, "greedy"),
        (
            "--temperature 0.5",
            {},
            {"temperature": 0.5, "do_sample": True},
            "sampling with seed 0, temperature 0.5",
        ),
        ("--do-sample", {}, {"do_sample": True}, "sampling with seed 0"),
        pytest.param("--num-beams 3", {}, {"num_beams": 3}, "3 beams", marks=pytest.mark.slow),
        (
            "--top-k 5",
            {"top_k": 9, "min_p": 0.1, "do_sample": False, "transformers_version": "5", "eos_token_id": 3},
            {"top_k": 5, "min_p": 0.1, "do_sample": True, "eos_token_id": 3},
            "sampling with seed 0, top_k 5",
        ),
        ("--greedy", {"do_sample": True}, {"do_sample": False}, "greedy"),
        ("", {"max_new_tokens": 5}, {}, "greedy"),
    ],
)
def test_flags_come_before_the_file(
    generate_folder: Path,
    flags: str,
    file: dict[str, Any],
    generation: dict[str, Any],
    words: str,
) -> None:
    (generate_folder / "settings.json").write_text(json.dumps(file))
    more = [*flags.split(), "--generation-config", "settings.json"]
    job = _job(_LINE, *more)
    assert (job["generation"], job["max_new_tokens"]) == (generation, 8)
    last = _run(_LINE, *more).stderr.splitlines()[-1]
    assert last == f"zerofit: generation: {words}, at most 8 new tokens"


@pytest.mark.parametrize(
    ("file", "own", "expected"),
    [
        pytest.param({}, {}, 256, marks=pytest.mark.slow),
        ({"max_new_tokens": 5}, {"max_new_tokens": 6}, 5),
        pytest.param({}, {"max_new_tokens": 6}, 6, marks=pytest.mark.slow),
    ],
)
def test_the_length_is_the_flags_or_the_files_or_the_models_own(
    generate_folder: Path,
    generate_models: Path,
    file: dict[str, Any],
    own: dict[str, Any],
    expected: int,
) -> None:
    shutil.copytree(generate_models / "t5", generate_folder / "own")  # T5 has positions for any length
    (generate_folder / "own" / "generation_config.json").write_text(json.dumps(own))
    (generate_folder / "settings.json").write_text(json.dumps(file))
    line = "--model own --prompts prompts.jsonl --out out.jsonl --cpu --generation-config settings.json"
    assert _job(line)["max_new_tokens"] == expected
    assert _run(line).stderr.splitlines()[-1] == f"zerofit: generation: greedy, at most {expected} new tokens"


def test_the_models_own_settings_are_used_and_printed(generate_folder: Path, generate_models: Path) -> None:
    shutil.copytree(generate_models / "gpt2", generate_folder / "own")
    (generate_folder / "own" / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.25}'
    )
    line = _LINE.replace("gpt2", "own")
    assert _job(line)["generation"] == {}
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
        pytest.param(_LINE, "--dtype bf16", False, marks=pytest.mark.slow),
        pytest.param(_LINE, "--max-new-tokens 9", False, marks=pytest.mark.slow),
        pytest.param(_LINE, "--num-beams 2", False, marks=pytest.mark.slow),
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


def test_one_process_generates_goes_on_where_it_was_killed_and_writes_nothing_over(
    generate_folder: Path, zerofit_fork: RunZerofit
) -> None:
    job = _job(_LINE)
    _unfinished(job)
    finished = zerofit_fork("generate", *_LINE.split(), cwd=generate_folder)
    assert (finished.returncode, finished.stdout) == (0, "")
    assert "zerofit: 1 of 2 prompts are already done" in finished.stderr
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
    (run,) = (generate_folder / "zerofit-runs").glob("2*")
    assert json.loads((run / "run.json").read_text())["exit_code"] == 0
    again = CliRunner().invoke(generate, _LINE.split(), standalone_mode=False)
    assert isinstance(again.exception, UserError)
    assert again.exception.rule == "generate-out-exists"


@pytest.mark.slow
def test_two_ranks_under_zero3_read_stdin_and_write_stdout(
    generate_folder: Path, zerofit_fork: RunZerofit, built_ops: None
) -> None:
    line = "--model t5 --prompts - --out - --max-new-tokens 6 --batch-size 1"
    line += " --cpu --num-processes 2 --zero-stage 3"
    prompts = ["hello", "good day", "a third one"]
    finished = zerofit_fork(
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


def test_gpus_of_another_machine_are_only_planned_for(generate_folder: Path) -> None:
    line = _LINE.replace("--cpu", "--gpus 8xA100-80G")
    shown = _run(line)
    assert ">  whole model on each of 2 GPUs" in shown.stderr
    assert "--num_processes 2" in shown.stdout.splitlines()[-1]
    assert _error(line).rule == "generate-gpus-elsewhere"
    assert _error(line, "--dry-run", "--cpu").fix == "leave out --cpu"
