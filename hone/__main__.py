"""`python -m hone` is the `hone` command."""

from hone.cli.main import run

if __name__ == "__main__":
    run()
