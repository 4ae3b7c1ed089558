"""Scripts that do not come to their training: what is said of each."""

from __future__ import annotations

from typing import Any

import pytest

_CHEAP = {
    "exits": (
        "import sys\nif True:\n    sys.exit('give --data')\n",
        "exited",
        'the script called sys.exit ("give --data") without importing accelerate or transformers',
        "exits.py:3",
    ),
    "reads": (
        "import sys\nfor line in sys.stdin:\n    print(line)\n",
        "stdin",
        "the script reads standard input",
        "reads.py:2",
    ),
    "torn": ("x = 1\ndef f(:\n", "raised", "SyntaxError: invalid syntax (torn.py, line 2)", "torn.py:2"),
}


@pytest.mark.parametrize("name", _CHEAP)
def test_a_script_that_trains_nothing_says_why(name: str, capture_in_child: Any) -> None:
    text, *expected = _CHEAP[name]
    left = capture_in_child(name, text)
    assert [left.failure[key] for key in ("kind", "message", "where")] == expected
    assert left.exit_code == 0
    assert not (left.folder / "capture.json").exists()


_WITH_TORCH = {
    "plain_torch": (
        "unsupported",
        "the script trains Linear without Accelerator or Trainer",
        "train.py:7",
    ),
    "plain_ddp": (
        "unsupported",
        "the script trains DistributedDataParallel without Accelerator or Trainer",
        "train.py:9",
    ),
    "generating": (
        "unsupported",
        "GRPOTrainer trains on what the model generates, which can't be captured without its weights; vLLM "
        "takes 30% of each GPU beside it (vllm_gpu_memory_utilization): plan the rest with --reserve 30%; "
        "without adapters, a reference model (beta=0.04) takes the weights once more",
        "train.py:19",
    ),
    "evaluates_first": (
        "needs-values",
        "RuntimeError: Tensor.item() cannot be called on meta tensors",
        "train.py:10",
    ),
    # Its own `except` would take an error of the capture's, and train.
    "swallows": ("raised", "ValueError: the index is gone", "train.py:14"),
    "dtypes": (
        "exited",
        "the script ended without creating an Accelerator or Trainer, though it imports accelerate and "
        "transformers",
        "",
    ),
}


@pytest.mark.parametrize("name", _WITH_TORCH)
def test_a_script_that_cannot_be_captured_says_why(name: str, captured_in_forks: Any) -> None:
    left = captured_in_forks(name)
    assert "the script went on" not in left.output
    assert (left.failure["kind"], left.failure["message"], left.failure["where"]) == _WITH_TORCH[name]
