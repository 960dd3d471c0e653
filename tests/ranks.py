"""Several ranks of one job, forked from a process that has imported everything: 0.1 s each instead of 3.

    results = run_ranks(2, train_both, folder)      # `train_both(folder)` on each of two ranks: JSON values and tensors

Whatever a rank returns comes back as bytes; a rank that raises, or does not end in time, fails the test with its
traceback. Functions have to be module-level ones, for the ranks find them by name.
"""

import json
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hone.models.numerics.products import VARIABLE, prepare
from tests.forks import CONTEXT

DEADLINE_S = 240
MEET_S = 120  # until every rank has begun, beside whatever else runs


def run_ranks(world, function, *arguments, timeout_s=60):
    """What `function(*arguments)` returns on each of `world` ranks: a dict of JSON values and tensors.

    A rank whose process ends by itself gives None; the others then have to say {"alone": True}. `timeout_s` is how long
    a rank waits for the others once all have met. All compute products in the way that this process has chosen, as the
    ranks of a run do: by trials of their own on a busy machine, replicated weights would differ in their last bits.
    """
    ways = ",".join({prepare(torch.float32), prepare(torch.bfloat16)})
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            CONTEXT.Process(target=_rank, args=(rank, world, folder, timeout_s, ways, function, arguments), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(DEADLINE_S)
        late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in late:
            ranks[rank].kill()
        errors = [path.read_text() for path in sorted(Path(folder).glob("*.error"))]
        assert not errors, "\n".join(errors)
        assert not late, f"ranks {late} did not end within {DEADLINE_S} s"
        return [_read(Path(folder), rank) for rank in range(world)]


def _read(folder, rank):
    if not (folder / f"{rank}.json").is_file():
        return None
    return json.loads((folder / f"{rank}.json").read_text()) | load_file(folder / f"{rank}.safetensors")


def _rank(rank, world, folder, timeout_s, ways, function, arguments):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ[VARIABLE] = ways
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=MEET_S),
        )
        dist.barrier()
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
        found = function(*arguments) or {}
        tensors = {name: one.contiguous().clone() for name, one in found.items() if isinstance(one, torch.Tensor)}
        save_file(tensors, f"{folder}/{rank}.safetensors")
        plain = {name: one for name, one in found.items() if name not in tensors}
        Path(f"{folder}/{rank}.json").write_text(json.dumps(plain))
        if found.get("alone"):
            os._exit(0)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 (a rank has no other way to tell)
        Path(f"{folder}/{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
