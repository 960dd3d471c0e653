"""An engine's state on disk: safetensors for tensors, JSON for numbers, so that loading runs no code.

    model-<rank>-of-<ranks>.safetensors      the parts of each weight that a rank holds, in master precision; buffers
    optimizer-<rank>-of-<ranks>.safetensors  "<weight>/<state>" tensors, such as "model.norm.weight/exp_avg"
    engine.json                              format, number of ranks, dtype, optimizer, its numbers, schedule's step

A model that changes without an optimizer (a reference that follows the policy) has no optimizer files, and null as its
optimizer.

Each file says in its header which box of which whole tensor each entry is, so any number of ranks, sharded in any way,
loads what any other number has saved, and reads only what it holds. A missing, unknown or misshapen tensor is an error
that names it. Restoring is exact to the bit, but for the state of an 8-bit optimizer on another mesh: its blocks have
other values there, and are quantised again.

In reading order: `engine_state` saves and restores an engine; `optimizer_state` names an optimizer's state by weight;
`eight_bit` cuts quantised state anew; `files` reads and writes.
"""
