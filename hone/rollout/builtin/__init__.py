"""The built-in rollout engine.

In reading order: `engine` (the verbs), `model_facts` (what it reads of a model), `scheduler` (queue and driver),
`batching` (one token per row and step), `requests`, `cache` (KV), `prefixes` (KV between turns), `sampling`, `decoder`
with its two implementations `fused` and `generic`, `graphs` (decode steps recorded and replayed), `states` (of
convolutions and recurrent layers), `scoring`. `indexed` runs sparse attention over the cache;
`snapshots` serves many snapshots of weights beside one base.
"""
