"""zerofit as a fork, for commands that start scripts; folders with models, whole and broken, and prompts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_folders import make_folder
from random_cases import Family
from runs import RunZerofit, run_command

from zerofit.core.allocation_log import TraceRequest
from zerofit.models.source import ModelSource
from zerofit.models.trace.generation import GenerateCall, GenerationTrace, trace_generation

_FILES = {
    "prompts.jsonl": '"hello"\n\n{"prompt": "good day", "id": 7}\n',
    "prompts.txt": "hello\ngood day\n",
    "empty.jsonl": "",
    "long.jsonl": '"hello"\n"' + "good day " * 60 + '"\n',
    "chats.jsonl": '{"messages": [{"role": "user", "content": "hi"}]}\n',
    "villains.jsonl": '"hi"\n{"messages": [{"role": "villain", "content": "hi"}]}\n',
    "silent.jinja": "{{ '' }}",
    "settings.json": '{"temprature": 0.5}',
    "length.json": '{"max_length": 100}',
    "cut.json": '{"top_p": 0.5,\n',
    "beams_0.json": '{"num_beams": 0}',
    "cold.json": '{"do_sample": true, "temperature": 0}',
    "lookup.json": '{"prompt_lookup_num_tokens": 3}',
    "least.json": '{"min_length": 5}',
}


@pytest.fixture
def zerofit_fork() -> RunZerofit:
    """Return run_zerofit for commands that capture a script, train or measure.

    They run in forks of a process that has imported the libraries, and so do the programs that they start.
    """

    def run(
        *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "zerofit", *arguments)
        done = run_command(command, cwd, stdin=stdin, **(environment or {}))
        return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def _traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def cache_folder(tmp_path_factory: pytest.TempPathFactory, _traces: Path) -> Path:
    """Return a cache in which there are the traces of other tests and nothing else."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "zerofit").mkdir()
    (folder / "zerofit" / "traces").symlink_to(_traces)
    return folder


@pytest.fixture(scope="session")
def generate_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models: whole ones, and one for each way in which one can be broken."""
    folder = tmp_path_factory.mktemp("models")
    for family in (Family.GPT2, Family.T5, Family.BART):
        make_folder(folder / family.value, family)
    _break_models(folder)
    return folder


def _break_models(folder: Path) -> None:
    broken = {
        name: shutil.copytree(folder / "gpt2", folder / name)
        for name in (
            "no_config",
            "cut",
            "lfs",
            "shards",
            "bert",
            "plain",
            "bad_tok",
            "bad_settings",
            "odd_settings",
            "empty",
            "no_weights",
            "no_tokenizer",
        )
    }
    (broken["no_config"] / "config.json").unlink()
    (broken["no_weights"] / "model.safetensors").unlink()
    for path in broken["no_tokenizer"].glob("tokenizer*"):
        path.unlink()
    weights = broken["cut"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (broken["lfs"] / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (broken["shards"] / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (broken["shards"] / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (broken["bert"] / "config.json").write_text(json.dumps(config))
    (broken["plain"] / "chat_template.jinja").unlink()
    (broken["bad_tok"] / "tokenizer.json").write_text("{}")
    (broken["bad_settings"] / "generation_config.json").write_text("{,")
    (broken["odd_settings"] / "generation_config.json").write_text('{"num_beams": 0}')
    (broken["empty"] / "model.safetensors").write_text("")


_MADE: dict[tuple[Any, ...], GenerationTrace] = {}


def _traced_once(
    source: ModelSource, call: GenerateCall, request: TraceRequest, *, cache_folder: Path | None, **how: bool
) -> GenerationTrace:
    """Trace a model of each architecture and precision for one length: no test here looks at its memory."""
    of_any_length = replace(call, prompt_length=8, max_new_tokens=min(call.max_new_tokens, 2))
    key = (source.config["model_type"], request.weights, of_any_length, *how.items())
    if key not in _MADE:
        of_length = replace(request, sequence_length=of_any_length.prompt_length)
        _MADE[key] = trace_generation(source, of_any_length, of_length, cache_folder=None, **how)
    return replace(_MADE[key], call=call)


@pytest.fixture
def generate_folder(tmp_path: Path, generate_models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with prompts and links to the models, which is the working directory."""
    monkeypatch.setattr("zerofit.models.trace.generation.trace_generation", _traced_once)
    for model in generate_models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    for name, text in _FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path
