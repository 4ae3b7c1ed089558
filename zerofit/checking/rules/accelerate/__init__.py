"""Rules about accelerate's file."""
