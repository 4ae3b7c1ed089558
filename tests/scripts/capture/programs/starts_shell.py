"""Starts its own ranks by a line for the shell."""

import os

os.system("cd . && torchrun --nproc_per_node 2 worker.py")
