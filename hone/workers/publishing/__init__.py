"""Publication of the trainer's weights.

`publication` decides which replica gets which version, `sending` sends one through a transport, `concurrent` is for
engines in this process that answer while the policy is trained, and `probe` compares log-probs after a sync.
"""
