"""For vLLM's `--logits-processors`: faults of quantised layers, which a file names while the server runs."""

from pathlib import Path

from vllm.model_executor.layers.quantization.online import fp8
from vllm.model_executor.model_loader.reload import layerwise
from vllm.v1.sample.logits_processor import LogitsProcessor


class QuantisationFaults(LogitsProcessor):
    """Reads the file `additional_config["faults"]` at every update.

    halved   a layer is quantised to half of its weights
    stale    what a layer was quantised to does not reach the memory that serves
    """

    def __init__(self, vllm_config, device, is_pin_memory):
        self._file = Path(vllm_config.additional_config["faults"])
        self._quantise, fp8._fp8_quant_per_channel = fp8._fp8_quant_per_channel, self._quantised
        self._copy, layerwise._copy_and_restore_kernel_tensors = (
            layerwise._copy_and_restore_kernel_tensors,
            self._copied,
        )

    def _quantised(self, weight, scale):
        return self._quantise(weight / 2 if self._file.read_text() == "halved" else weight, scale)

    def _copied(self, layer, info):
        stale = self._file.read_text() == "stale" and getattr(layer, "prefix", "").endswith("layers.1.mlp.down_proj")
        (layerwise._place_kernel_tensors if stale else self._copy)(layer, info)

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        return logits
