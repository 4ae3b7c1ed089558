"""Host memory of a rank and of a node while a run loads, trains and saves."""
