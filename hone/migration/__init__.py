"""Run files from the scripts and settings of other frameworks (`hone migrate`).

    script or file of the other framework --> its options, nothing run --> Migration --> a commented run file

Each option of the other framework ends in one of four lists: it has a key here, it can be dropped (with the reason),
a person has to decide, or it is unknown. None is guessed.

`migration` holds what is known of one migration, `page` writes the run file, `shell` reads bash scripts, `flags` reads
command lines, and `verl`, `trl` and `openrlhf` know the options of their framework.
"""
