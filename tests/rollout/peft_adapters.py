"""LoRA adapters as PEFT itself makes, writes and computes them."""

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict


def as_json(config):
    """PEFT's configuration as `adapter_config.json` has it."""
    found = {**config.to_dict(), "peft_type": "LORA"}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in found.items()}


def adapt(model, seed, **settings):
    """PEFT's model around `model`, with an adapter off its neutral start; the adapter's tensors and configuration."""
    config = LoraConfig(**{"r": 4, "lora_alpha": 10, **settings})
    torch.manual_seed(seed)
    adapted = get_peft_model(model, config).eval()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data += (0.3 if "magnitude" in name else 0.1) * torch.rand_like(parameter)
    return adapted, get_peft_model_state_dict(adapted, save_embedding_layers=False), as_json(config)
