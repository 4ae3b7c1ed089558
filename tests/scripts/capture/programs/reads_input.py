"""Asks before it trains."""

if input("Train now? [y/n] ") == "y":
    print("training")
