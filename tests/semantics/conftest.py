"""What the tests of this folder share: each script by itself, run once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from trainings import WHOLE, Ended, run_plainly

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="session")
def by_itself(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """Return a function that gives a script's run by plain accelerate; each is run at its first use."""
    known: dict[tuple[object, ...], Ended] = {}

    def run(script: str, *arguments: str, num_processes: int) -> Ended:
        if (script, num_processes) in WHOLE:
            arguments, num_processes = (*arguments, *WHOLE[script, num_processes]), 1
        key = (script, arguments, num_processes)
        if key not in known:
            folder = tmp_path_factory.mktemp(f"plain-{script}")
            known[key] = run_plainly(script, folder, *arguments, num_processes=num_processes)
        return known[key]

    return run


@pytest.fixture(scope="session")
def covered_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Llama of four blocks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tmp_path_factory.mktemp("covered") / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", **sizes, **heads, **tokens)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session", autouse=True)
def _ops(built_ops: None) -> None:
    """Build DeepSpeed's ops first."""
