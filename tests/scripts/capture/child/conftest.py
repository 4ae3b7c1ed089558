"""Captures of small scripts: two in a child process as a user's, the others in forks of the fork server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from forked_programs import ForkedProgram

from zerofit.core.capture import Capture, capture_from_json

_HERE = Path(__file__).parent
_TIMEOUT_S = 240
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "pad_token_id": 0,
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16"}
_SMALL_LLAMA = {**_LLAMA, **_SMALL, "num_key_value_heads": 2, "max_position_embeddings": 128}
MODELS = {
    "llama-gptq": {
        **_SMALL_LLAMA,
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16},
    },
    "llama-fp8": {
        **_SMALL_LLAMA,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    },
    "llama": _SMALL_LLAMA,
    "bert": {
        "architectures": ["BertForMaskedLM"],
        "model_type": "bert",
        "max_position_embeddings": 64,
        **_SMALL,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 100,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    },
    # https://huggingface.co/meta-llama/Llama-3.1-70B/blob/main/config.json
    "llama-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
}
"""Folders with a config.json and no weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A finished child: its folder, its script and its output."""

    folder: Path
    script: Path
    output: str
    exit_code: int

    @property
    def capture(self) -> Capture:
        """Return the capture, as its parent reads it."""
        file = self.folder / "capture.json"
        assert file.exists(), f"{self.failure}\n{self.output}"
        return capture_from_json(file.read_text(), name="capture.json")

    def place_of(self, code: str) -> str:
        """Return name and line of the script's line that holds some code."""
        lines = self.script.read_text().splitlines()
        (line,) = [number for number, line in enumerate(lines, start=1) if code in line]
        return f"{self.script.name}:{line}"

    @property
    def failure(self) -> dict[str, str]:
        """Return the failure."""
        document: dict[str, str] = json.loads((self.folder / "failure.json").read_text())
        return document


def _prepare(place: Path) -> Path:
    """Return the folder of a capture, beside a script's models."""
    for name, config in MODELS.items():
        (place / name).mkdir(parents=True, exist_ok=True)
        (place / name / "config.json").write_text(json.dumps(config))
    folder = place / "captured"
    (folder / "t").mkdir(parents=True)
    spec = {
        "weights": "meta",
        "num_batches": 4,
        "gpus": [],
        "serve": None,
        "roots": [str(place)],
        "caches": [],
        "allowed": [],
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    return folder


def _environment(place: Path, port: int) -> dict[str, str]:
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    quiet = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    temporary = str(place / "captured" / "t")
    return {**os.environ, **one_rank, **quiet, "MASTER_PORT": str(port), "TMPDIR": temporary}


def _run(command: list[str], place: Path, port: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=place,
        env=_environment(place, port),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
    )


@pytest.fixture(scope="session")
def capture_in_child(tmp_path_factory: pytest.TempPathFactory, free_tcp_port: int) -> Any:
    """Return a function that captures scripts/NAME.py, or a text, by the real command."""

    @cache
    def capture(name: str, text: str | None = None) -> Left:
        place = tmp_path_factory.mktemp(name)
        folder = _prepare(place)
        script = place / f"{name}.py"
        script.write_text((_HERE / "scripts" / f"{name}.py").read_text() if text is None else text)
        command = ["-m", "zerofit.scripts.capture.child", str(folder), script.name, "--epochs", "3"]
        done = _run(command, place, free_tcp_port)
        return Left(folder=folder, script=script, output=done.stdout, exit_code=done.returncode)

    return capture


@pytest.fixture(scope="session")
def free_tcp_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel's choice: no other suite has the same
        port: int = server.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def captured_in_forks(tmp_path_factory: pytest.TempPathFactory, free_tcp_port: int) -> Any:
    """Return a function that captures one of scripts/forked/*.py, once, in a fork of the fork server."""
    root = tmp_path_factory.mktemp("forked")

    @cache
    def capture(name: str) -> Left:
        place = root / name
        folder = _prepare(place)
        script = place / "train.py"
        script.write_text((_HERE / "scripts" / "forked" / f"{name}.py").read_text())
        command = [sys.executable, "-m", "zerofit.scripts.capture.child", str(folder), script.name]
        with (place / "output").open("w+b") as output:
            child = ForkedProgram(
                command,
                cwd=place,
                env=_environment(place, free_tcp_port),
                stdout=output,
                stderr=output,
                start_new_session=True,  # as zerofit starts it
            )
            exit_code = child.wait(_TIMEOUT_S)
        text = (place / "output").read_text()
        return Left(folder=folder, script=script, output=text, exit_code=exit_code)

    return capture
