"""Small models trained by scripts/several_dimensions.py on groups of ranks, against one process."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from runs import SCRIPTS, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TOLERANCE = 2e-5
"""Relative. Sums over the ranks of a group are rounded in another order; twelve AdamW steps carry that on."""
WEIGHT_TOLERANCE = 5e-4
"""Absolute, of weights of about 0.1: a tenth of one AdamW step, whose sign is that of rounding where a
gradient is nothing else; 1.4e-4 is seen at single weights (three heads over two tensor-parallel ranks)."""
MEAN_TOLERANCE = 2e-6
"""Absolute, of all weights of a tensor together."""
NUM_SAMPLES = 96
NUM_STEPS = 12
GLOBAL_BATCH_SIZE = 8
SAVED_AT = 4
"""The step at whose end runs that will be resumed save."""
_LLAMA = {"model_type": "llama", "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "tied": {**_LLAMA, "tie_word_embeddings": True},
    "tied, four blocks": {**_LLAMA, "tie_word_embeddings": True, "num_hidden_layers": 4},
    "llama, seven blocks": {**_LLAMA, "num_hidden_layers": 7},
    "one key-value head": {**_LLAMA, "num_key_value_heads": 1},
    "three heads": {**_LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2},
    "qwen3, four blocks": {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 4,
    },
    "gemma2": {"model_type": "gemma2", "num_key_value_heads": 2, "head_dim": 16},
    "gpt_neox": {"model_type": "gpt_neox"},
    "phi3": {"model_type": "phi3"},
    "opt": {"model_type": "opt", "word_embed_proj_dim": 64, "ffn_dim": 128, "dropout": 0.0},
    "gpt2": {
        "model_type": "gpt2",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
    },
    "sliding window": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 6},
    "six heads": {**_LLAMA, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
    "recurrent": {"model_type": "mamba", "state_size": 8, "num_attention_heads": None},
    "alibi": {"model_type": "falcon", "alibi": True, "ffn_hidden_size": 128},
    "hybrid": {
        "model_type": "qwen3_next",
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        **dict.fromkeys(("num_experts", "linear_num_value_heads"), 4),
        **dict.fromkeys(("num_experts_per_tok", "linear_num_key_heads"), 2),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "moe_intermediate_size"), 16),
    },
    "mixtral": {"model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4},
    "mixtral with a balancing loss": {
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "output_router_logits": True,
    },
    "dropout": {**_LLAMA, "num_key_value_heads": 1, "attention_dropout": 0.1},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """What trains a model: the fixtures of these names, of tests/launching/conftest.py."""

    launch: Callable[..., Run]
    model_of: Callable[[str], Path]
    one_process: Callable[..., Path]


def save_model(kind: str, path: Path) -> None:
    """Save an untrained model of a kind."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if kind != "gpt2":
        fields |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        fields |= {"num_attention_heads": 4, "max_position_embeddings": 64}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(**{**fields, **MODELS[kind]})
        AutoModelForCausalLM.from_config(config).save_pretrained(path)


def script(model: Path, *arguments: str) -> list[str]:
    """Return the script that trains a model, with its arguments."""
    return [str(SCRIPTS / "several_dimensions.py"), "--model", str(model), *arguments]


def ranks_of(folder: Path) -> list[dict[str, Any]]:
    """Return what each rank wrote down."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def groups_of(ranks: Sequence[str]) -> tuple[int, int]:
    """Return how many groups share samples, and the ranks of each.

    Args:
        ranks: flags that begin with "--num-processes N --...-parallel-size M".
    """
    num_ranks, size = int(ranks[1]), int(ranks[3]) if ranks[2:3] and "parallel-size" in ranks[2] else 1
    return num_ranks // size, size


def train_alike(
    runs: Runs, kind: str, ranks: Sequence[str], *arguments: str, by_trainer: bool = False
) -> Run:
    """Launch the script, and check that it trains what one process trains at the same global batch.

    Args:
        runs: the fixture of that name.
        kind: of the model.
        ranks: flags of the launch, as in groups_of().
        arguments: of the script.
        by_trainer: True to train by Trainer, False by a loop of the script's own.
    """
    more = (*arguments, *(("--trainer",) if by_trainer else ()))
    num_groups, size = groups_of(ranks)
    batch_size = str(GLOBAL_BATCH_SIZE // num_groups)
    run = runs.launch(*ranks, *script(runs.model_of(kind), "--batch-size", batch_size, *more)).check()
    alone = runs.one_process(kind, "--batch-size", str(GLOBAL_BATCH_SIZE), *more)
    assert_trains_as(run.folder / "out", alone, group=size)
    return run


def resume_alike(
    runs: Runs,
    kind: str,
    ranks: Sequence[str],
    *arguments: str,
    by_trainer: bool = False,
    resumed_on: Sequence[str] | None = None,
) -> None:
    """Check that a run that goes on from its checkpoint trains what one process trains without a stop.

    Args:
        runs: the fixture of that name.
        kind: of the model.
        ranks: flags of the launch, as in groups_of().
        arguments: of the script.
        by_trainer: True to train by Trainer, False by a loop of the script's own.
        resumed_on: flags of the second launch; None for the same.
    """
    more = (*arguments, *(("--trainer",) if by_trainer else ()))
    batch_size = str(GLOBAL_BATCH_SIZE // groups_of(ranks)[0])
    target = script(runs.model_of(kind), "--batch-size", batch_size, f"--save-step={SAVED_AT}", *more)
    run = runs.launch(*ranks, *target).check()
    kept = run.folder / "kept"
    shutil.move(run.folder / "out" / (f"checkpoint-{SAVED_AT}" if by_trainer else "state"), kept)
    for path in (run.folder / "out", run.folder / "zerofit-runs"):
        shutil.rmtree(path)
    resumed = runs.launch(*(ranks if resumed_on is None else resumed_on), *target, "--resume", str(kept))
    resumed.check()
    alone = runs.one_process(kind, "--batch-size", str(GLOBAL_BATCH_SIZE), *more)
    (first, *_), (whole,) = ranks_of(resumed.folder / "out"), ranks_of(alone)
    assert len(first["steps"]) == NUM_STEPS - SAVED_AT
    losses = [loss for _, loss, _ in whole["steps"][SAVED_AT:]]
    assert [loss for _, loss, _ in first["steps"]] == pytest.approx(losses, rel=TOLERANCE)
    assert_same_weights(resumed.folder / "out", alone)


def assert_trains_as(folder: Path, reference: Path, *, group: int = 2) -> None:
    """Check batches, losses, learning rates, what is gathered, and the saved weights."""
    ranks, (alone,) = ranks_of(folder), ranks_of(reference)
    first = ranks[0]
    for number, rank in enumerate(ranks):
        assert rank["seen"] == ranks[number // group * group]["seen"]
    shares = [rank["seen"] for rank in ranks[::group]]
    per_step = [sorted(chain(*batches)) for batches in zip(*shares, strict=True)]
    assert per_step == [sorted(batch) for batch in alone["seen"]][-len(per_step) :]
    steps, expected = first["steps"], alone["steps"][-len(first["steps"]) :]
    assert [step for step, _, _ in steps] == [step for step, _, _ in expected]
    assert [rate for _, _, rate in steps] == pytest.approx([rate for _, _, rate in expected], rel=1e-9)
    assert [loss for _, loss, _ in steps] == pytest.approx([loss for _, loss, _ in expected], rel=TOLERANCE)
    assert first["samples_per_step"] == alone["samples_per_step"]
    assert first["eval_tokens"] == alone["eval_tokens"]
    assert first["generated"] == alone["generated"]
    assert first["summed"] == len(shares)
    assert_same_weights(folder, reference)


def assert_same_weights(folder: Path, reference: Path) -> None:
    """Check that both hold the same tensors and configurations, and that from_pretrained() finds each."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    saved, expected = (load_file(one / "model" / "model.safetensors") for one in (folder, reference))
    assert saved.keys() == expected.keys()
    for name, weight in expected.items():
        differences = (saved[name] - weight).abs()
        assert differences.max().item() < WEIGHT_TOLERANCE, name
        # OPT's attention is the same with any bias of keys: its gradient is rounding.
        if not (name.startswith("model.decoder.") and name.endswith("k_proj.bias")):
            assert differences.mean().item() < MEAN_TOLERANCE, name
    for name in ("config.json", "generation_config.json"):
        assert (folder / "model" / name).read_text() == (reference / "model" / name).read_text()
    _, found = AutoModelForCausalLM.from_pretrained(folder / "model", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["mismatched_keys"]
