"""`python -m mucudnn` is the command `mucudnn`."""

from mucudnn.cli import main

if __name__ == "__main__":
    main(prog_name="mucudnn")
