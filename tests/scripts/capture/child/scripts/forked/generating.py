"""A trainer that trains on what its model generates, by the name that TRL gives it."""

import transformers


class GRPOTrainer(transformers.Trainer):
    """Stands in for TRL's."""


GRPOTrainer.__module__ = "trl.trainer.grpo_trainer"
GRPOTrainer(model=None)
