"""Run files from scripts, settings files and commands of TRL.

    Python script (read, not run), YAML of the `trl` command, or its arguments --> options --> Migration

Checked against TRL 1.16, with names of 1.9 to 1.18.
"""
