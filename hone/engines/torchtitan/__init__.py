"""The `torchtitan` engine: torchtitan's decoder, parallelised by torchtitan, under hone's batches and losses.

In reading order: `settings`; `mesh`, torchtitan's meshes; `families`, which Hugging Face models it builds; `modules`,
what hone puts in place of torchtitan's attention, rotary positions, embedding and head; `sharding`, the decoder over
the meshes; `names`, what each weight is called by transformers; `engine`. `quiet_import` imports torchtitan without its
warnings, and refuses other versions. What torchtitan takes for an accelerator is in `cpu_patches`; nothing of it is
applied on one.
"""
