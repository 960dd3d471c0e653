"""The contracts of rollout engines: tokens with the log-probs of the model that is served, whatever happens meanwhile.

The numbers are those of transformers' plain forward of the same weights.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hone.rollout.base import Generating, RolloutEngine, ServerAdapter, ServerSpec
from hone.rollout.settings import RolloutConfig
from hone.testing.contract import Broken, require
from hone.testing.serving import CONTEXT, SHORT, VOCABULARY, Serving, Shared
from hone.types import Completion, PromptTooLong, SamplingParams, StopReason
from hone.weights import TRANSPORTS
from hone.weights.sync import CheckpointEngineManager

ASKED = 64  # requests at once
COME_S = 30.0  # until the first tokens of an answer
BUCKET_BYTES = 1 << 16
SYNC_S = 60.0


class _RolloutContract(Serving):
    """Contract of `hone.rollout.base.Generating`."""

    # ------------------------------------------------------------------------------------------------------ checks

    def test_greedy_tokens_are_the_most_likely(self) -> None:
        """greedy tokens are the most likely ones of transformers, with their log-probs"""
        prompts = self._prompts(6)
        for prompt, found in zip(prompts, self._all(prompts, temperature=0.0), strict=True):
            logits = self._forward(self.shared.first, (*prompt, *found.token_ids))[len(prompt) - 1 : -1]
            best = tuple(logits.argmax(-1).tolist())
            require(found.token_ids == best, f"greedy tokens are {found.token_ids}, the most likely are {best}")
            self._check_logprobs(self.shared.first, prompt, found)

    def test_sampled_tokens_have_their_log_probs(self) -> None:
        """sampled tokens have the log-probs of transformers, and the version of the weights"""
        prompts = self._prompts(8)
        for prompt, found in zip(prompts, self._all(prompts), strict=True):
            sizes = {len(found.token_ids), len(found.logprobs), len(found.weight_versions)}
            require(sizes == {SHORT}, f"{SHORT} tokens were asked for, found fields of {sizes}")
            self._check_logprobs(self.shared.first, prompt, found)
            self._check_versions([found], {0})

    def test_scores_are_those_of_transformers(self) -> None:
        """`score` gives the log-probs of a text"""
        for number, text in enumerate(self._prompts(4)):
            scored = self.wait(self.engine.score(f"score-{number}", text))
            logits = self._forward(self.shared.first, text)[:-1].log_softmax(-1)
            wanted = logits.gather(1, torch.tensor(text[1:], dtype=torch.long)[:, None])[:, 0]
            self._within(torch.tensor(scored.logprobs[1:]), wanted, "scores")

    def test_a_seed_decides_and_nothing_else(self) -> None:
        """a request's tokens are the same alone, together and in another order, and differ by seed"""
        prompts = self._prompts(6)
        together = [one.token_ids for one in self._all(prompts)]
        samples = {one.token_ids for one in self._all([prompts[1]] * 8)}
        require(len(samples) > 1, "eight samples of a prompt with seeds of their own are all alike")
        if self.seeds_positions:
            order = list(reversed(range(len(prompts))))
            back = self._all([prompts[i] for i in order], seeds=order)
            require([one.token_ids for one in reversed(back)] == together, "another order gave other tokens")
            alone = self._all(prompts[3:4], seeds=[3])[0].token_ids
            require(alone == together[3], f"alone, a request gives {alone}, and beside others {together[3]}")

    def test_answers_end_where_they_should(self) -> None:
        """an answer ends with a stop token, which it keeps, at its length, or where the context is full"""
        prompt = self._prompts(2)[1]
        (free,) = self._all([prompt], temperature=0.0)
        stop = free.token_ids[3]
        expected = free.token_ids[: free.token_ids.index(stop) + 1]
        (cut,) = self._all([prompt], temperature=0.0, stop_token_ids=(stop,))
        require(cut.token_ids == expected, f"stopped at token {stop}, the answer is {cut.token_ids}, not {expected}")
        reasons = (free.stop_reason, cut.stop_reason)
        require(reasons == (StopReason.LENGTH, StopReason.STOP), f"they ended because of {reasons}")
        (full,) = self._all([(9,) * (CONTEXT - 8)], max_tokens=1000)
        require(
            (len(full.token_ids), full.stop_reason) == (8, StopReason.LENGTH),
            f"with 8 tokens left, an answer has {len(full.token_ids)} and ends by {full.stop_reason}",
        )

    def test_bad_requests_are_refused_and_the_others_go_on(self) -> None:
        """a request that cannot be served is a ValueError with its name"""
        bad: list[tuple[tuple[int, ...], dict[str, Any]]] = [
            ((), {}),
            ((9,) * CONTEXT, {}),
            ((9, VOCABULARY), {}),
            ((9,), {"temperature": -0.1}),
            ((9,), {"top_p": 1.5}),
        ]

        async def play() -> list[Completion]:
            good = asyncio.create_task(self._asked(self._prompts(3), "good"))
            for prompt, more in bad:
                try:
                    await self._generate("bad", prompt, SamplingParams(**{"max_tokens": 4, **more}))
                except ValueError as error:
                    require("bad" in str(error), f"the error does not name the request: {error}")
                    long = len(prompt) == CONTEXT
                    require(isinstance(error, PromptTooLong) == long, f"{len(prompt)} tokens raised {error!r}")
                else:
                    raise Broken(f"a prompt of {len(prompt)} tokens {prompt[:2]} with {more} was served")
            return await good

        require(len(self.wait(play())) == 3, "the other requests were lost")

    def test_many_requests_at_once(self) -> None:
        """more requests than fit at once all end, each with its own answer"""
        prompts = self._prompts(2)[1:] * ASKED
        found = self._all(prompts, max_tokens=3)
        names = [one.request_id for one in found]
        require(names == [f"r{i}" for i in range(ASKED)], f"answers belong to the requests {names[:3]} ...")
        require(all(len(one.token_ids) == 3 for one in found), "some answers have other lengths than 3")

    def test_abort_gives_the_tokens_so_far(self) -> None:
        """`abort_all` ends running requests with what they have"""
        prompts = self._prompts(4)
        whole = self._all(prompts, max_tokens=self.long_tokens, temperature=0.0)
        cut = self._during(prompts, self.engine.abort_all)
        require(any(one.stop_reason is StopReason.ABORTED for one in cut), "no request was aborted")
        for one, all_of_it in zip(cut, whole, strict=True):
            begins = all_of_it.token_ids[: len(one.token_ids)]
            require(one.token_ids == begins, f"an aborted answer has other tokens: {one.token_ids[:8]} ...")
            require(len(one.logprobs) == len(one.token_ids), "an aborted answer has tokens without log-probs")

    def test_a_pause_loses_no_token(self) -> None:
        """while paused no token comes, and afterwards requests go on where they were"""
        prompts = self._prompts(4)
        whole = self._all(prompts, max_tokens=self.long_tokens, temperature=0.0)

        async def pause() -> None:
            await self.engine.pause()
            late = asyncio.create_task(self._asked(prompts[:1], "late"))
            await asyncio.sleep(0.2)
            require(not late.done(), "a request was served while the engine was paused")
            await self.engine.resume()
            await late

        found = self._during(prompts, pause)
        require([one.token_ids for one in found] == [one.token_ids for one in whole], "tokens changed over a pause")

    def test_new_weights_count_from_the_next_token(self) -> None:
        """answers after an update come from the new weights alone, also for prompts that were cached"""
        prompts = self._prompts(4)
        self._all(prompts)
        self.wait(self.update(self.shared.weights(self.shared.second), 1))
        require(self.engine.weight_version == 1, f"the engine serves version {self.engine.weight_version}, sent was 1")
        found = self._all(prompts)
        self._check_versions(found, {1})
        for prompt, one in zip(prompts, found, strict=True):
            self._check_logprobs(self.shared.second, prompt, one)

    def test_an_update_in_flight_marks_its_tokens(self) -> None:
        """tokens say which weights sampled them, when these change under a request that runs"""
        prompts = self._prompts(3)

        async def update() -> None:
            await self.update(self.shared.weights(self.shared.second), 7)

        found = self._during(prompts, update)
        self._check_versions(found, {0, 7})
        for prompt, one in zip(prompts, found, strict=True):
            versions = list(one.weight_versions)
            require(versions == sorted(versions), f"versions of tokens go back: {versions[:8]} ...")
            begin = versions.index(7)
            self._check_logprobs(self.shared.second, prompt, one, begin)

    def test_an_incomplete_update_is_refused(self) -> None:
        """an update without one of the weights is an error that names it, and nothing is served until a whole one"""
        weights = self.shared.weights(self.shared.second)
        name = next(name for name in weights if name.endswith("layers.1.mlp.up_proj.weight"))

        async def play() -> list[Completion]:
            try:
                await self.update({key: one for key, one in weights.items() if key != name}, 2)
            except (ValueError, RuntimeError) as error:
                require(name in str(error), f"the error does not name {name}: {error}")
            else:
                raise Broken(f"an update without {name} was accepted")
            await self._must_refuse("after an incomplete update")
            await self.update(weights, 2)
            return await self._asked(self._prompts(1))

        self._check_versions(self.wait(play()), {2})

    def test_sleep_without_cache(self) -> None:
        """asleep at level 1 nothing is served, and afterwards the same answers come"""
        prompts = self._prompts(3)

        async def play() -> list[Completion]:
            await self.engine.sleep(1)
            await self._must_refuse("asleep")
            await self.engine.wake_up()
            return await self._asked(prompts, temperature=0.0)

        before = self._all(prompts, temperature=0.0)
        after = self.wait(play())
        require([a.token_ids for a in after] == [b.token_ids for b in before], "sleep changed greedy answers")

    def test_metrics_count_since_the_last_look(self) -> None:
        """`metrics` counts tokens once"""
        self.engine.metrics()
        self._all(self._prompts(5), max_tokens=4)
        found = [self.engine.metrics()["rollout/tokens"].value for _ in range(2)]
        require(found == [20, 0], f"20 tokens came; two looks at rollout/tokens give {found}")

    def test_sleep_without_weights(self) -> None:
        """asleep at level 2 the weights are gone, and nothing is served before they were sent again"""
        prompts = self._prompts(3)

        async def play() -> list[Completion]:
            await self.engine.sleep(2)
            await self._must_refuse("asleep")
            await self.engine.wake_up()
            await self._must_refuse("without weights")
            await self.update(self.shared.weights(self.shared.second), 1)
            return await self._asked(prompts, temperature=0.0)

        for prompt, one in zip(prompts, self.wait(play()), strict=True):
            self._check_logprobs(self.shared.second, prompt, one)


class RolloutEngineContract(_RolloutContract):
    """Contract of `hone.rollout.base.RolloutEngine`: an engine in this process."""

    def make(self, model: Any, tokenizer: Any) -> RolloutEngine:
        """Return an engine of this transformers model. It gets its weights by `update_weights`."""
        raise NotImplementedError

    async def started(self, shared: Shared) -> Generating:
        return self.make(copy.deepcopy(shared.first), shared.tokenizer)

    async def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        served = await self.engine.update_weights(weights.items(), version)
        require(served.version == version, f"the engine says that it serves {served.version}, sent was {version}")

    async def let_some_come(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)


class RolloutServerContract(_RolloutContract):
    """Contract of `hone.rollout.base.ServerAdapter`: a server in its own process, which gets weights by a sync.

    `options` are keys of `rollout`, such as `python`, `engine` and `start_timeout_s`.
    """

    options: ClassVar[Mapping[str, Any]] = {}

    def make(self, spec: ServerSpec) -> ServerAdapter:
        """Return the adapter, not started."""
        raise NotImplementedError

    async def started(self, shared: Shared) -> Generating:
        config = RolloutConfig.model_validate(dict(self.options))
        adapter = self.make(ServerSpec(config, str(shared.folder), "float32", 0, shared.logs, shared.token))
        await adapter.start()
        require(adapter.alive, "the server was started, and is not alive")
        return adapter

    async def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        sender = TRANSPORTS.get("ipc")(BUCKET_BYTES, SYNC_S, self.shared.token)
        manager = CheckpointEngineManager(sender)
        manager.add_replica(self.engine)
        try:
            await manager.sync(weights.items(), version)
        finally:
            await sender.close()

    async def let_some_come(self) -> None:
        before = await self.engine.beat()
        async with asyncio.timeout(COME_S):
            while (await self.engine.beat()) == before:
                await asyncio.sleep(0.002)

    async def ended(self, engine: Any) -> None:
        await engine.close()

    def test_a_closed_server_is_gone(self) -> None:
        """closing twice is fine, and a closed server can be started again"""

        async def play() -> None:
            await self.engine.close()
            require(not self.engine.alive, "the server is alive after it was closed")
            await self.engine.close()
            await self.engine.start()
            require(self.engine.weight_version == -1, "a server serves weights that it was never sent")

        self.wait(play())
        self.wait(self._as_new())
        self._check_versions(self._all(self._prompts(2)), {0})


__all__ = ["RolloutEngineContract", "RolloutServerContract"]
