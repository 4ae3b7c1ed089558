"""Hooks on DeepSpeed's engine, and on models that it trains, inside the training process."""
