"""LoRA, for every engine. One without transformers modules attaches it to an empty model, for names and values.

In reading order: `adapter` (what an engine uses), `peft_layers` (adds PEFT's layers to the model), `targets` (chooses
the layers), `whole_modules` (modules trained in full: `modules_to_save`), `first_values` (initialisation), `merging`,
`adapter_files` (PEFT's files).
"""
