"""LoRA, for every engine whose model is a transformers module.

In reading order: `adapter` (what an engine uses), `peft_layers` (adds PEFT's layers to the model), `targets` (chooses
the layers), `whole_modules` (modules trained in full: `modules_to_save`), `first_values` (initialisation), `merging`,
`adapter_files` (PEFT's files).
"""
