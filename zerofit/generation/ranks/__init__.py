"""How the ranks of a generation keep in step: who calls what, and what each must wait for."""
