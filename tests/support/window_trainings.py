"""Small models and their batches, trained by windows and, in plain torch, by one big batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerators import hooked
from torch.nn import functional
from torch.utils.data import DataLoader
from trainer_training import TOKENS, causal_model

STEPS = 4
"""Batches in a window. Of 6 batches of 3 samples and one of 1 come windows of 12 and, in 3 batches, of 7."""
SAMPLES, BATCH_SIZE, RATE = 19, 3, 0.5
SAME = 1e-5
"""Relative, in fp32."""


def ragged(sample: list[dict[str, Any]]) -> dict[str, Any]:
    """Return sentences of 2 to 9 tokens as one batch, padded to the longest."""
    return dict(TOKENS["collator"]()(sample))


def sentence(sample: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the same with one label a sentence."""
    labels = torch.tensor([one["labels"][0] for one in sample])
    return {**ragged(sample), "labels": labels}


def language(sample: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the same with the next tokens as labels."""
    batch = ragged(sample)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return {**batch, "labels": labels}


def classifier(**more: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    set_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, **{"num_labels": 3, **sizes, **no_dropout, **more})
    )


def own_loss(model: Any, batch: dict[str, Any]) -> Any:
    """The model's."""
    return model(**batch).loss


def scripts_loss(model: Any, batch: dict[str, Any]) -> Any:
    """One that the script takes of the outputs, over the tokens that have a label."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "classification": (classifier, sentence, own_loss),
    "several labels": (
        lambda: classifier(problem_type="multi_label_classification"),
        lambda sample: {
            **(made := sentence(sample)),
            "labels": functional.one_hot(made["labels"], 3).float(),
        },
        own_loss,
    ),
    "token classification": (TOKENS["tiny_model"], ragged, own_loss),
    "causal language model": (causal_model, language, own_loss),
    "a loss of the script's": (TOKENS["tiny_model"], ragged, scripts_loss),
}


def big_batches(kind: str, *, clip: float | None = None, rate: float = RATE) -> list[torch.Tensor]:
    """Return the weights after one step a window, of one batch of all its samples, in plain torch."""
    make, collate, loss_of = KINDS[kind]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for batch in DataLoader(TOKENS["samples"](SAMPLES), batch_size=STEPS * BATCH_SIZE, collate_fn=collate):
        loss_of(model, batch).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def windows(
    kind: str, *, clip: float | None = None, set_by_plan: bool = True, **arguments: Any
) -> tuple[list[torch.Tensor], tuple[str, ...]]:
    """Return the weights after a script's loop with accumulate(), and what was noted."""
    accelerator_class, changes = hooked(gradient_accumulation_steps=STEPS if set_by_plan else None)
    own = {"gradient_accumulation_steps": 1 if set_by_plan else STEPS}
    accelerator = accelerator_class(**{**own, **arguments})
    make, collate, loss_of = KINDS[kind]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(TOKENS["samples"](SAMPLES), batch_size=BATCH_SIZE, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters()), changes.lines


def off_from_big_batches(ours: list[torch.Tensor], kind: str, *, clip: float | None = None) -> float:
    """Return how far a training is from that by one big batch a window, relative to how far that went."""
    return distance(ours, big_batches(kind, clip=clip), list(KINDS[kind][0]().parameters()))


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor], start: list[torch.Tensor]) -> float:
    """Return how far two trainings are apart, of how far they went."""
    apart, went = (
        torch.cat([(one - other).detach().flatten() for one, other in zip(first, second, strict=True)]).norm()
        for first, second in ((ours, theirs), (theirs, start))
    )
    return float(apart / went)
