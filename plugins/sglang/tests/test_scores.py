"""SGLang says how likely it finds tokens as the plain forward does, and an aborted request is sent again."""

import asyncio

import pytest

from hone.types import GenerationRequest, SamplingParams, StopReason
from tests.rollout.conftest import REAL
from tests.rollout.servers.test_server_scores import Aborting, check_scores


@pytest.mark.sglang
def test_a_server_scores_with_the_weights_of_its_folder(real_adapter, runner, tiny, forward):
    server = real_adapter("sglang", lora={"frozen": True})
    runner.run(server.start())
    try:
        check_scores(server, tiny(REAL["sglang"].model), runner, forward)
    finally:
        runner.run(server.close())


def test_sglang_refuses_an_aborted_request_whose_schema_it_compiles_and_hone_sends_it_again(unstarted, finish):
    server = unstarted("sglang")
    wanted = SamplingParams(max_tokens=4, json_schema="{}")

    async def refused(text):
        server.connection = Aborting(ValueError(f"replica sglang-0 refused /generate (status 400): {text}"))
        found, _ = await asyncio.gather(server.generate(GenerationRequest("r", (9,), wanted)), server.abort_all())
        return found

    assert finish(refused("Aborted by AbortReq.")).stop_reason is StopReason.ABORTED
    with pytest.raises(ValueError, match="Failed to compile json grammar"):
        finish(refused("Failed to compile json grammar"))
