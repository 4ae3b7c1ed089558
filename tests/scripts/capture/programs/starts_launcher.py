"""Starts its own ranks by a program."""

import subprocess

subprocess.run(["accelerate", "launch", "--num_processes", "2", "worker.py"], check=True)
