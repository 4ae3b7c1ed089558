"""Step time: compute, communication, offload traffic, optimizer step."""
