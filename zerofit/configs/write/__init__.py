"""Writes DeepSpeed's JSON, accelerate's YAML, TrainingArguments and launch commands."""
