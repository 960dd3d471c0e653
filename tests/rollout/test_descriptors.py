"""More requests than this process has file descriptors for: they wait, and no server is blamed."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys
from pathlib import Path
from hone.rollout.base import ServerSpec
from hone.rollout.router import Router
from hone.rollout.settings import RolloutConfig
from hone.types import GenerationRequest, SamplingParams
from tests.rollout.test_server_death import Small

folder = Path(sys.argv[1])
(folder / "lived").touch()  # the server lives
settings = RolloutConfig(start_timeout_s=60, request_timeout_s=120, python=sys.executable, replicas=2)


async def main():
    engines = [Small(ServerSpec(settings, str(folder), "float32", n, folder, "token")) for n in range(2)]
    router = Router(engines, settings)
    try:
        for one in engines:
            await one.start()
            one.take_weights()
        wanted = SamplingParams(max_tokens=2)
        requests = [GenerationRequest(f"1/{i}/0/0", (9,), wanted) for i in range(300)]
        found = await asyncio.gather(*(router.generate(request) for request in requests))
        counted = router.metrics()
        print(len(found), *(int(counted[f"rollout/{n}"].value) for n in ("replica_restarts", "requests_resent")))
    finally:
        await router.close()


asyncio.run(main())
"""


@pytest.mark.slow
def test_requests_beyond_the_descriptors_wait(tmp_path, tiny):
    tiny("qwen3").save_pretrained(tmp_path)
    command = f"ulimit -n 96; exec {sys.executable} -c '{PROGRAM}' {tmp_path}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.split() == ["300", "0", "0"], done.stderr[-3000:]
