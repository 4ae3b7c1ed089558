"""Trains in a process that it spawns."""

import multiprocessing


def train(rank):
    open("trained.txt", "w").close()


if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=train, args=(0,))
    process.start()
    process.join()
