"""Publication of the trainer's weights.

`publication` decides which replica gets which version, `sending` sends one through a transport, and `probe` compares
log-probs after a sync.
"""
