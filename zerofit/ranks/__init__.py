"""How the ranks of a run meet: a call that all must make, values and errors that all share."""
