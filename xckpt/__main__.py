"""`python -m xckpt`: the command line, where its script is not on the path."""

from xckpt.cli import main

if __name__ == "__main__":
    main()
