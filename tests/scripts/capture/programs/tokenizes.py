"""Tokenizes for ten minutes, in worker processes, before it trains."""

import multiprocessing
import subprocess
import time


def tokenize(part):
    time.sleep(600)


if __name__ == "__main__":
    print("Tokenizing:   0%", end="\r", flush=True)
    print("Tokenizing:  12%", end="\r", flush=True)
    server = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
    with multiprocessing.Pool(2) as pool:
        pool.map(tokenize, range(2))
