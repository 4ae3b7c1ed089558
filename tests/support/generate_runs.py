"""A tiny model with its tokenizer, and `zerofit generate` run with it: to its end, or killed before."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from runs import RUN_TIMEOUT_S, Run, environment, run_command

NUM_POSITIONS = 96
_LOOKS_EVERY_S = 0.005


def make_model(folder: Path) -> Path:
    """Save an untrained GPT-2, whose tokens lie far apart, with a tokenizer; return the folder."""
    import torch
    from made.tokenizers import gpt_tokenizer
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = gpt_tokenizer()
    tokenizer.save_pretrained(folder)
    no_special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": NUM_POSITIONS}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(vocab_size=len(tokenizer), initializer_range=0.5, **shape, **no_special)
        )
    model.save_pretrained(folder)
    return folder


def write_prompts(path: Path, prompts: Iterable[dict[str, Any]]) -> Path:
    """Write a JSONL file of prompts; return its path."""
    path.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    return path


def generate_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "zerofit", "generate", "--cpu", *arguments]


def generate_run(folder: Path, *arguments: str) -> Run:
    """Run `zerofit generate --cpu` with these arguments in a folder to its end."""
    return run_command(generate_command(*arguments), folder)


def kill_when(moment: Callable[[], bool], folder: Path, *arguments: str) -> None:
    """Run `zerofit generate --cpu`, and kill it with all that it started as soon as a moment has come."""
    with started(folder, *arguments) as process:
        wait_for(moment, process, folder)


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start `zerofit generate --cpu`, whose stderr goes into the file "stderr"; kill all of it after."""
    with (folder / "stderr").open("w") as said:
        process = subprocess.Popen(
            generate_command(*arguments),
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            text=True,
        )
    try:
        yield process
    finally:
        all_of_it = process_tree(process)
        for each in all_of_it:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()
        psutil.wait_procs(all_of_it)


def wait_for(moment: Callable[[], bool], process: subprocess.Popen[str], folder: Path) -> None:
    """Return as soon as a moment in the life of a process has come."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while not moment():
        assert process.poll() is None, (folder / "stderr").read_text()
        assert time.monotonic() < deadline
        time.sleep(_LOOKS_EVERY_S)


def process_tree(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return a process and all below it; none where it has ended."""
    if process.poll() is not None:
        return []
    root = psutil.Process(process.pid)
    return [root, *root.children(recursive=True)]
