"""Examples of the rules about FSDP2."""
