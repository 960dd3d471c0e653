"""Parts for engines that rebuild a transformers model in another package's modules.

settings, config.json  --`configs`--> refused by name, if the other package's modules compute something else
model, on the meta device             names, shapes and config, under which everybody else knows the weights
safetensors files, or a model from `model.build`  --`reading`--> the regions of weights that this rank holds
"""
