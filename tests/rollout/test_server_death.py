"""A real server on a private socket that dies with requests open, behind the router."""

import asyncio
import sys
import time
from pathlib import Path

from hone.rollout.base import ServerSpec
from hone.rollout.router import Router
from hone.rollout.servers.engine import EngineDefaults, EngineServer
from hone.rollout.servers.host import SOCKET
from hone.rollout.settings import RolloutConfig
from hone.types import Completion, GenerationRequest, SamplingParams, StopReason


class Small(EngineServer):
    """The adapter of `dying_server.py`."""

    package = "hone"
    health = "/health"
    positional_seed = True
    defaults = EngineDefaults()
    how_to_install = "it is there"

    def _launch(self, site):
        program = str(Path(__file__).with_name("dying_server.py"))
        command = [sys.executable, program, str(site.folder / SOCKET), str(self._spec.logs / "lived")]
        return command, self.defaults.server_environment(self._spec, site.folder)

    async def _longest_sequence(self):
        return 100

    async def _generate(self, request, images):
        ids = tuple((await self.connection.post("/generate", {}))["token_ids"])
        versions = (self.weight_version,) * len(ids)
        return Completion(request.id, ids, (-1.0,) * len(ids), versions, StopReason.LENGTH), 1, 0

    async def _never(self, *_):
        raise NotImplementedError

    _score = _abort_open = _hold = _go_on = _receive = _give_back = _take_again = unfit_for_adapter = _never

    def take_weights(self):
        self._state.serve(5)


def test_all_requests_of_a_server_whose_engine_died_go_on_after_its_restart(tmp_path, finish, tiny):
    tiny("qwen3").save_pretrained(tmp_path / "model")
    settings = RolloutConfig(start_timeout_s=30, python=sys.executable)
    spec = ServerSpec(settings, str(tmp_path / "model"), "float32", 0, tmp_path, "token")
    engine = Small(spec)
    router = Router([engine], spec.settings)

    async def restore(replica):
        replica.take_weights()
        return True

    async def story():
        router.restore_with(restore)
        await engine.start()
        engine.take_weights()
        asked = (router.generate(GenerationRequest(f"1/{i}/0/0", (9,), SamplingParams(max_tokens=2))) for i in range(4))
        found = await asyncio.gather(*asked, return_exceptions=True)
        await router.revived()
        counted = router.metrics()
        await router.close()
        return found, counted

    started = time.perf_counter()
    found, counted = finish(story())
    assert [getattr(one, "token_ids", one) for one in found] == [(7, 8)] * 4
    assert {one.weight_versions for one in found} == {(5, 5)}
    assert counted["rollout/requests_resent"].value == 4
    assert counted["rollout/replica_restarts"].value == 1, "a loss that is heard of late is not the new server's"
    assert 0 < counted["perf/rollout_busy_seconds"].value < time.perf_counter() - started
