"""The `veomni` engine: VeOmni's models, operators and FSDP2 under hone's batches, losses and packed attention.

In reading order: `settings`; `models`, VeOmni's classes and operators; `sharding`, its FSDP2; `engine`, which is
`fsdp2` with these two in the place of its own. `quiet_import` imports veomni without its log.
"""
