"""Rules about FSDP2."""
