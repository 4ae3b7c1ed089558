"""Rules about DeepSpeed's file."""
