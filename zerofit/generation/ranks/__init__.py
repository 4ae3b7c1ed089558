"""Coordination of the ranks of a generation: who has called what, and what each must wait for."""
