"""The command line: one file per command, found by `main`, which imports none of them before it is asked for."""
