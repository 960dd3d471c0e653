"""For vLLM's `--logits-processors`: each step takes 4 ms longer, so that tests can act while a tiny model generates."""

import time

from vllm.v1.sample.logits_processor import LogitsProcessor


class SlowSteps(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return False  # those that are one are left out where everybody is greedy

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        time.sleep(0.004)
        return logits
