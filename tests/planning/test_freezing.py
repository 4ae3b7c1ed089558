"""What --allow freeze freezes: the embeddings of each family, or its layers, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from planning_problems import made_trace, model

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.freezing import FROZEN_EMBEDDINGS, FROZEN_LAYERS, frozen_names

_T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50}


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gpt2", _GPT2),
        ("t5", _T5),
        *((family, _SMALL) for family in ("bert", "llama", "gpt_neox", "qwen3", "vit")),
        ("opt", {**_SMALL, "ffn_dim": 16, "word_embed_proj_dim": 16}),
        ("bloom", {"hidden_size": 16, "n_layer": 1, "n_head": 2}),
        ("qwen2_moe", {**_SMALL, "num_experts": 2, "num_key_value_heads": 2, "decoder_sparse_step": 1}),
    ],
)
def test_embeddings_and_layers_are_told_apart_in_every_family(family: str, config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    with torch.device("meta"):
        built = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(family, **config))
    names = {f"model.{name}" for name, _ in built.named_parameters()}
    embeddings = frozen_names(names, FROZEN_EMBEDDINGS)
    layers = frozen_names(names, FROZEN_LAYERS)
    of_embeddings = {
        f"model.{path}.{name}"
        for path, module in built.named_modules()
        if isinstance(module, torch.nn.Embedding) and "relative_attention" not in path
        for name, _ in module.named_parameters()
    }
    assert embeddings >= of_embeddings & names
    assert layers
    assert not embeddings & layers
    assert all("norm" in name or "pooler" in name or "ln_f" in name for name in names - embeddings - layers)


@pytest.mark.parametrize(
    ("freeze", "trained"),
    [
        ((), {"embeddings", "layers", "head"}),
        (FROZEN_EMBEDDINGS, {"layers", "head"}),
        (FROZEN_LAYERS, {"embeddings", "head"}),
    ],
)
def test_closed_forms_freeze_it_too(freeze: tuple[str, ...], trained: set[str]) -> None:
    trace = made_trace(model(num_parameters=130_000_000))
    log = trace(TraceRequest(sequence_length=8, freeze=freeze)).logs[0]
    names = {one.name.removeprefix("model.").partition(".")[0] for one in log.parameters if one.trains}
    assert names == trained
