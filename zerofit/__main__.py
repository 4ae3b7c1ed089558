"""python -m zerofit."""

from zerofit.cli.main import main

if __name__ == "__main__":
    main()
