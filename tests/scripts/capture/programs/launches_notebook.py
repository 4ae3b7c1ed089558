"""Starts its own ranks by accelerate's notebook_launcher."""

from accelerate import notebook_launcher


def train():
    open("trained.txt", "w").close()


if __name__ == "__main__":
    notebook_launcher(train, num_processes=2)
