"""The command line: one file per command. `main` imports only the command that was given."""
