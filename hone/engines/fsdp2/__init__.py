"""The `fsdp2` engine: FSDP2 around transformers models.

In reading order: `engine` builds the model and moves its parts; `settings`; `mesh`, the process groups; `sharding`
applies tensor and expert parallelism and FSDP2; `shards` says which part of a weight a rank holds, and gathers whole
weights; `exchange` gives each rank only the boxes that it needs; `weights` holds masters and working weights;
`compiled`, torch.compile of each layer.
"""
