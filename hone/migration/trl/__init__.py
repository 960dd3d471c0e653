"""Run files from scripts, settings files and commands of TRL.

    Python script (read, not run), YAML of the `trl` command, or its arguments --> options --> Migration

`source` reads Python scripts, `command` reads YAML and shell commands, `reader` maps the options, and `dropped` lists
those without a counterpart.

Checked against TRL 1.16, with names of 1.9 to 1.18.
"""
