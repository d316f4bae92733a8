"""The command line, run as `python -m lce`."""

from lce.cli import main

if __name__ == "__main__":
    main()
