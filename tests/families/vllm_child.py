"""Run by vLLM's Python: each family's model takes in the trainer's weights as a weight sync brings them, and samples.

    <folder>/state.safetensors --hone.workers.vllm's loading, layer by layer--> a real vLLM --> <folder>/sampled.json

One process for all, for most of a server's start is imports. Arguments: folders. Prompts and sizes come by stdin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from hone.models.checkpoint_names import as_in_files
from hone.workers.vllm import unfilled
from hone.workers.vllm_patches import pack_cpu_experts_again


def sample(folder: Path, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Completions and their log-probs, with the weights of `state.safetensors`."""
    llm = LLM(
        model=str(folder),
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        block_size=32,
        kv_cache_memory_bytes=2**24,
        logprobs_mode="processed_logprobs",
    )
    try:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        model, config = runner.get_model(), runner.model_config
        pack_cpu_experts_again(model)
        initialize_layerwise_reload(model)
        model.load_weights(as_in_files(config.hf_config, iter(load_file(folder / "state.safetensors").items())))
        gaps = unfilled(model)
        finalize_layerwise_reload(model, config)
        if gaps:
            return {"error": f"weights that vLLM wants were not sent: {', '.join(gaps[:5])}"}
        asked = [SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, seed=i) for i in range(len(prompts))]
        outputs = llm.generate([TokensPrompt(prompt_token_ids=one) for one in prompts], asked, use_tqdm=False)
        found = []
        for output in outputs:
            ids = list(output.outputs[0].token_ids)
            logprobs = [at[one].logprob for one, at in zip(ids, output.outputs[0].logprobs or [], strict=True)]
            found.append({"token_ids": ids, "logprobs": logprobs})
        return {"sampled": found}
    finally:
        del llm
        cleanup_dist_env_and_memory()


def main() -> None:
    asked = json.loads(sys.stdin.read())
    for folder in map(Path, sys.argv[1:]):
        try:
            found = sample(folder, asked["prompts"], asked["tokens"])
        except Exception as error:  # noqa: BLE001  whatever it is, it is the cell of the table
            found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[-400:]}
        (folder / "sampled.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
