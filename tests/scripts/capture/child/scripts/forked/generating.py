"""A trainer that trains on what its model generates, by the name that TRL gives it."""

import transformers


class GRPOTrainer(transformers.Trainer):
    """Stands in for TRL's."""


class Config:
    """Stands in for TRL's GRPOConfig."""

    output_dir = "out"
    use_vllm, vllm_mode, vllm_gpu_memory_utilization = True, "colocate", 0.3
    vllm_enable_sleep_mode, beta = False, 0.04


GRPOTrainer.__module__ = "trl.trainer.grpo_trainer"
GRPOTrainer(model=None, args=Config())
