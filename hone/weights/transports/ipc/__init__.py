"""`ipc`: weights between processes of one machine.

`engine` sends from one process through `memory` that both share. `by_rank` lets every training rank send to the
receivers on its device: `needs` says which parts, and `rank_sender` is the rank's side.
"""
