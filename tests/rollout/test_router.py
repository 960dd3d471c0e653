"""The router: who serves a request, and what nobody above it notices."""

import asyncio
from dataclasses import replace

import pytest

from hone.deadline import Deadline
from hone.processes.restarts import Restarts
from hone.rollout.base import ReplicaLost, ScoreAborted
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.pending import PendingRequest
from hone.rollout.replicas import Replica
from hone.rollout.router import RESTART_WINDOW_S, PoisonRequest, RequestLate, Router
from hone.rollout.settings import BuiltinSettings, RolloutConfig
from hone.schedule.replay import ReplayError
from hone.types import Completion, GenerationRequest, SamplingParams, Scored, StopReason

WANTED = SamplingParams(max_tokens=40, ignore_eos=True, seed=5)


class Mortal:
    """The built-in engine as a process would hold it: it can die, start again empty, and be given weights."""

    positional_seed = True

    def __init__(self, model, tokenizer, number, order):
        self.name = f"mortal-{number}"
        self._model, self._tokenizer = model, tokenizer
        self.alive = True
        self.starts = 0
        self.fail_starts = 0
        self.seen, self.order = [], order
        self.engine = BuiltinEngine(BuiltinSettings(), model, tokenizer, replica=self.name)

    def __getattr__(self, verb):
        return getattr(self.engine, verb)

    async def generate(self, request):
        if not self.alive:
            raise ReplicaLost(f"{self.name} is dead")
        self.seen.append((request.id, request.tokens, request.sampling))
        self.order.append(request.id)
        completion = await self.engine.generate(request)
        if not self.alive:  # its process ended before it could answer
            raise ReplicaLost(f"{self.name} died during {request.id}")
        return completion

    async def die(self):
        self.alive = False
        await self.engine.abort_all()

    async def close(self):
        self.alive = False

    async def start(self):
        self.starts += 1
        if self.starts <= self.fail_starts:
            raise RuntimeError("no memory")
        self.engine = BuiltinEngine(BuiltinSettings(), self._model.config, self._tokenizer, replica=self.name)
        self.alive = True


@pytest.fixture
def fleet(tiny, tokenizer):
    """`fleet(2, **settings)`: a router over mortals that gives weights to those that start again, and the mortals."""

    def make(count=2, window_s=RESTART_WINDOW_S, **settings):
        model = tiny("qwen3")
        order = []
        mortals = [Mortal(model, tokenizer, number, order) for number in range(count)]
        router = Router(mortals, RolloutConfig(**settings), tokenizer, window_s)

        async def restore(engine):
            await engine.update_weights(model.state_dict().items(), 0)
            return True

        router.restore_with(restore)
        return router, mortals

    return make


async def steps(number=12):
    for _ in range(number):
        await asyncio.sleep(0)


def test_turns_of_a_trajectory_stay_with_their_replica_and_others_go_where_is_least_to_do(fleet, finish):
    router, mortals = fleet(3)

    async def story():
        wanted = replace(WANTED, max_tokens=2)
        for turn, order in enumerate(((0, 1, 2, 3, 4, 5), (3, 1, 5, 0, 2, 4), (5, 4, 3, 2, 1, 0))):
            await asyncio.gather(
                *(router.generate(GenerationRequest(f"1/0/{i}/{turn}", (9, 10 + i), wanted)) for i in order)
            )

    finish(story())
    homes = [{request.rpartition("/")[0] for request, _, _ in one.seen} for one in mortals]
    assert sorted(len(one) for one in homes) == [2, 2, 2]
    assert len(set.union(*homes)) == 6, "no trajectory was at two replicas"


def test_a_replica_has_so_many_requests_at_a_time_and_the_others_wait_in_order(fleet, finish):
    router, mortals = fleet(2, requests_per_replica=2)
    most = [0, 0]

    async def story():
        wanted = replace(WANTED, max_tokens=5)
        running = [asyncio.create_task(router.generate(GenerationRequest(f"r{i}", (9, 10), wanted))) for i in range(10)]
        while not all(task.done() for task in running):
            for place, mortal in enumerate(mortals):
                most[place] = max(most[place], len(mortal.engine._scheduler._open))
            await asyncio.sleep(0)

    finish(story())
    assert most == [2, 2]
    assert mortals[0].order == [f"r{i}" for i in range(10)]


def test_a_replica_that_dies_in_the_middle_is_not_noticed(fleet, finish):
    router, mortals = fleet(2, requests_per_replica=2)  # else the samples of a prompt would all go to one
    alone = finish(mortals[0].engine.generate(GenerationRequest("x", (9, 10), WANTED)))

    async def story():
        running = [
            asyncio.create_task(router.generate(GenerationRequest(f"1/{i}/0/0", (9, 10), WANTED))) for i in range(4)
        ]
        await steps()
        await mortals[1].die()
        found = await asyncio.gather(*running)
        await router.revived()
        later = await asyncio.gather(
            *(router.generate(GenerationRequest(f"2/{i}/0/0", (9, 10), WANTED)) for i in range(4))
        )
        return found, later

    found, later = finish(story())
    assert {(c.token_ids, c.stop_reason) for c in (*found, *later)} == {(alone.token_ids, StopReason.LENGTH)}
    assert mortals[1].starts == 1
    assert sum(request.startswith("2/") for request, _, _ in mortals[1].seen) == 2, "it serves again"
    metrics = router.metrics()
    assert metrics["rollout/requests_resent"].value == 2
    assert metrics["rollout/replica_restarts"].value == 1


def test_utilisation_is_the_share_of_the_time_with_requests(fleet, finish):
    router, _ = fleet(2)
    router.metrics()
    finish(router.generate(GenerationRequest("r", (9, 10), WANTED)))
    assert 0 < router.metrics()["perf/rollout_utilisation"].value <= 0.5, "the other replica had no request"
    assert router.metrics()["perf/rollout_utilisation"].value == 0


def test_a_replica_that_has_a_request_and_twice_no_token_is_the_slowest(fleet, finish):
    router, (stuck, _) = fleet(2, requests_per_replica=1)

    async def story():
        await stuck.engine.pause()
        router.metrics()
        waiting, found = asyncio.create_task(router.generate(GenerationRequest("r", (9, 10), WANTED))), []
        await steps()
        for number in range(2):
            await router.generate(GenerationRequest(f"1/{number}/0/0", (9, 10), WANTED))
            found.append(router.metrics())
        await stuck.engine.resume()
        await waiting
        return found

    first, second = finish(story())
    assert "perf/slowest_replica" not in first, "its answer may be longer than a step"
    assert (second["perf/slowest_replica"].value, second["perf/slowest_replica_speed"].value) == (0, 0.0)


def test_tokens_that_count_when_their_answer_ends_are_of_the_time_since_it_began():
    replica = Replica(None, "replica", Restarts(1, 1.0))
    assert [replica.speed(*figures) for figures in ((0, 8, 10), (0, 8, 10), (32, 16, 20))] == [None, 0.0, 1.0]
    assert [replica.speed(*figures) for figures in ((0, 2, 10), (30, 10, 10))] == [None, 3.0], "it had little to do"


def test_a_replica_that_is_receiving_weights_counts_as_one_that_serves(fleet, finish):
    router, (one, _) = fleet()
    with router.updating([one]):
        assert router.metrics()["rollout/replicas_serving"].value == 2
    assert router.metrics()["rollout/replicas_serving"].value == 1, "the sync ended without its proof"


def test_the_only_replica_is_waited_for(fleet, finish):
    router, (mortal,) = fleet(1)
    mortal.fail_starts = 1

    async def story():
        running = asyncio.create_task(router.generate(GenerationRequest("r", (9, 10), WANTED)))
        await steps()
        await mortal.die()
        return await running

    assert len(finish(story()).token_ids) == 40
    assert mortal.starts == 2


@pytest.mark.parametrize("error", [KeyError("receipts"), TimeoutError("late"), ZeroDivisionError("no")])
def test_whatever_goes_wrong_in_a_revival_it_is_tried_again(fleet, finish, error):
    router, (mortal,) = fleet(1)
    restores = []

    async def restore(engine):
        restores.append(engine)
        if len(restores) == 1:
            raise error
        await engine.update_weights(engine._model.state_dict().items(), 0)
        return True

    router.restore_with(restore)

    async def story():
        await mortal.die()
        return await router.generate(GenerationRequest("r", (9, 10), WANTED))

    assert len(finish(story()).token_ids) == 40
    assert (len(restores), mortal.starts) == (2, 2)


def test_a_loss_that_is_heard_of_late_is_not_that_of_the_new_server(fleet, finish):
    router, (mortal,) = fleet(1)
    told = asyncio.Event()
    generate = mortal.generate

    async def late(request):
        if request.id != "late":
            return await generate(request)
        await told.wait()
        raise ReplicaLost("the connection to the server that was broke")

    mortal.generate = late

    async def story():
        running = asyncio.create_task(router.generate(GenerationRequest("late", (9, 10), WANTED)))
        await steps()
        await mortal.die()
        await router.generate(GenerationRequest("other", (9, 10), WANTED))  # after the restart
        told.set()
        return await running

    assert len(finish(story()).token_ids) == 40
    assert mortal.starts == 1


def test_one_that_died_while_nothing_ran_is_noticed_before_it_is_asked(fleet, finish):
    router, mortals = fleet(2)

    async def story():
        await mortals[0].die()
        return await router.generate(GenerationRequest("r", (9, 10), WANTED))

    assert len(finish(story()).token_ids) == 40
    assert [request for request, _, _ in mortals[1].seen] == ["r"]


def test_without_weights_to_give_it_waits_for_a_sync(fleet, finish):
    router, mortals = fleet(2, requests_per_replica=1)

    async def nothing_yet(engine):
        return False

    router.restore_with(nothing_yet)

    async def story():
        await mortals[1].die()
        await router.generate(GenerationRequest("a", (9, 10), WANTED))
        await router.revived()
        assert mortals[1].alive
        await asyncio.gather(*(router.generate(GenerationRequest(f"b{i}", (9, 10), WANTED)) for i in range(3)))
        assert mortals[1].seen == []
        assert mortals[1] in router.replicas, "a sync reaches it"
        await mortals[1].update_weights(mortals[1]._model.state_dict().items(), 0)
        router.replica_serves(mortals[1])
        await asyncio.gather(*(router.generate(GenerationRequest(f"c{i}", (9, 10), WANTED)) for i in range(3)))

    finish(story())
    assert mortals[1].seen


@pytest.mark.parametrize(("window_s", "starts"), [(0.2, 3), (3600.0, 1)])
def test_only_deaths_within_the_window_are_too_many(fleet, finish, window_s, starts):
    router, (mortal,) = fleet(1, window_s, max_restarts=1)

    async def story():
        for _ in range(3):
            await mortal.die()
            await router.generate(GenerationRequest("r", (9, 10), replace(WANTED, max_tokens=2)))
            await asyncio.sleep(0.25)

    if starts == 3:
        finish(story())
    else:
        with pytest.raises(RuntimeError, match="1 restarts within 3600 s"):
            finish(story())
    assert mortal.starts == starts


def test_when_no_replica_is_left_everybody_hears_why(fleet, finish):
    router, mortals = fleet(2, max_restarts=1)
    for mortal in mortals:
        mortal.fail_starts = 9

    async def story():
        running = [asyncio.create_task(router.generate(GenerationRequest(f"r{i}", (9, 10), WANTED))) for i in range(3)]
        await steps()
        for mortal in mortals:
            await mortal.die()
        return await asyncio.gather(*running, return_exceptions=True)

    for error in finish(story()):
        assert isinstance(error, RuntimeError)
        assert "mortal-0" in str(error)
        assert "no memory" in str(error)
        assert "max_restarts = 1" in str(error)


def test_a_late_answer_names_replica_and_request(fleet, finish):
    router, (mortal,) = fleet(1, request_timeout_s=2.0)

    async def story():
        await mortal.engine.pause()
        with pytest.raises(RequestLate, match=r"mortal-0 did not answer request 'r' within 2 s"):
            await router.generate(GenerationRequest("r", (9, 10), WANTED))
        await mortal.engine.resume()
        return await router.generate(GenerationRequest("again", (9, 10), replace(WANTED, max_tokens=1)))

    assert len(finish(story()).token_ids) == 1


def test_a_caller_that_leaves_gives_its_seat_back(fleet, finish):
    router, (mortal,) = fleet(1, requests_per_replica=1)

    async def story():
        tasks = [asyncio.create_task(router.generate(GenerationRequest(f"r{i}", (9, 10), WANTED))) for i in range(3)]
        await steps()
        tasks[0].cancel()  # has the seat
        tasks[1].cancel()  # waits
        await asyncio.gather(*tasks, return_exceptions=True)
        return tasks[2].result()

    assert len(finish(story()).token_ids) == 40
    assert [request for request, _, _ in mortal.seen] == ["r0", "r2"]


class Pieces:
    """Gives a completion in two pieces: the first ends after so many tokens, aborted unless another reason is given."""

    def __init__(self, ids, first, positional_seed, ends=StopReason.ABORTED):
        self.positional_seed = positional_seed
        self._ends = ends
        self._ids, self._first = ids, first
        self.asked = []

    @property
    def weight_version(self):
        return len(self.asked) + 1

    async def generate(self, request):
        self.asked.append((request.id, request.tokens, request.sampling))
        piece = self._ids[: self._first] if len(self.asked) == 1 else self._ids[self._first :]
        reason = self._ends if len(self.asked) == 1 else StopReason.LENGTH
        version = len(self.asked)
        return Completion(request.id, tuple(piece), (-0.25,) * len(piece), (version,) * len(piece), reason)


@pytest.mark.parametrize("positional", [True, False])
def test_the_rest_of_a_completion_is_asked_for_with_what_is_left(finish, positional):
    engine = Pieces([11, 12, 13, 14, 15], 2, positional)
    found = finish(
        Router([engine], RolloutConfig()).generate(GenerationRequest("1/2/3/0", (9,), replace(WANTED, max_tokens=5)))
    )
    (first, second) = engine.asked
    assert first[:2] == ("1/2/3/0", (9,))
    assert second[:2] == ("1/2/3/0+1", (9, 11, 12))
    assert (first[2].max_tokens, second[2].max_tokens) == (5, 3)
    assert (second[2].seed == first[2].seed) is positional
    assert (found.request_id, found.token_ids) == ("1/2/3/0", (11, 12, 13, 14, 15))
    assert found.weight_versions == (1, 1, 2, 2, 2)
    assert len(found.logprobs) == 5
    assert found.stop_reason is StopReason.LENGTH


def test_an_answer_that_follows_a_schema_begins_anew(finish):
    """An engine follows a schema from the first token of an answer, so it cannot continue the beginning of one."""
    engine = Pieces([11, 12, 13, 14, 15], 2, True)
    wanted = replace(WANTED, max_tokens=5, json_schema="{}")
    found = finish(Router([engine], RolloutConfig()).generate(GenerationRequest("1/2/3/0", (9,), wanted)))
    assert [(prompt, sampling.max_tokens) for _, prompt, sampling in engine.asked] == [((9,), 5)] * 2
    assert found.token_ids == (13, 14, 15)
    assert len(found.logprobs) == len(found.weight_versions) == 3


def test_an_answer_that_follows_a_schema_is_not_replayed_across_versions(finish):
    """Its later versions would begin the schema anew, in the middle of the answer."""
    wanted = replace(WANTED, max_tokens=5, json_schema="{}")

    def replay(first, spans):
        engine = Pieces([11, 12, 13, 14, 15], first, True, ends=StopReason.LENGTH)
        router = Router([engine], RolloutConfig())
        return finish(router.generate(GenerationRequest("1/2/3/0", (9,), wanted, spans=spans)))

    with pytest.raises(ReplayError, match=r"request '1/2/3/0' cannot be replayed: .* \(\(\(1, 2\), \(2, 3\)\)\)"):
        replay(2, ((1, 2), (2, 3)))
    assert replay(5, ((1, 5), (2, 3))).token_ids == (11, 12, 13, 14, 15), "the next turn has the other version"


def test_an_engine_that_cannot_score_a_prompt_is_named(finish):
    router = Router([Pieces([11], 1, True)], RolloutConfig())
    with pytest.raises(ValueError, match=r"rollout engine \S+ cannot compute log-probs of a prompt: it has no `score`"):
        finish(router.generate(GenerationRequest("r", (9,), replace(WANTED, max_tokens=0, prompt_logprobs=0))))


class Scoring(Pieces):
    """Aborts so many scorings before it answers one."""

    aborts = 1

    async def score(self, request_id, token_ids, top_k=0):
        self.asked.append(request_id)
        if len(self.asked) <= self.aborts:
            raise ScoreAborted("aborted")
        return Scored((0.0, -1.0))


def test_a_scoring_that_a_replica_aborts_is_sent_again(finish):
    engine = Scoring([11], 1, True)
    router = Router([engine], RolloutConfig())
    assert finish(router.score("r", (9, 10))).logprobs == (0.0, -1.0)
    assert engine.asked == ["r", "r+"]


def test_a_scoring_that_everybody_aborts_ends(finish):
    engine = Scoring([11], 1, True)
    router = Router([engine], RolloutConfig())

    async def aborted(request_id, token_ids, top_k=0):
        router._aborts += 1
        await asyncio.sleep(0)
        raise ScoreAborted("aborted")

    engine.score = aborted
    with pytest.raises(RuntimeError, match="request 'r' was aborted"):
        finish(router.score("r", (9, 10)))


def test_a_stop_string_may_lie_across_two_pieces(finish, tokenizer):
    ids = tokenizer("say stop now", add_special_tokens=False)["input_ids"]
    engine = Pieces(ids, 6, True)  # "say st" + "op now"
    wanted = replace(WANTED, stop=("stop",))
    found = finish(Router([engine], RolloutConfig(), tokenizer).generate(GenerationRequest("r", (9,), wanted)))
    assert tokenizer.decode(found.token_ids) == "say stop"
    assert found.stop_reason is StopReason.STOP
    assert len(found.logprobs) == len(found.weight_versions) == 8


def test_a_stop_string_is_sought_in_the_last_tokens_only(tokenizer):
    copied = []

    class Watched(list):
        def __getitem__(self, key):
            if isinstance(key, slice):
                copied.append(len(range(*key.indices(len(self)))))
            return super().__getitem__(key)

    ids = tokenizer("ab" * 1000, add_special_tokens=False)["input_ids"]
    pending = PendingRequest(GenerationRequest("r", (9,), replace(WANTED, stop=("stop",))))
    pending.tokens = Watched(ids)
    router = Router([], RolloutConfig(), tokenizer)
    assert not router._stopped_across(pending, 1)
    assert len(copied) == len(ids) - 1
    assert max(copied) < 20


def test_an_abort_ends_those_that_wait_too(fleet, finish):
    router, _ = fleet(1, requests_per_replica=1)

    async def story():
        running = [asyncio.create_task(router.generate(GenerationRequest(f"r{i}", (9, 10), WANTED))) for i in range(3)]
        await steps()
        await router.abort_all()
        return await asyncio.gather(*running)

    found = finish(story())
    assert [c.stop_reason for c in found] == [StopReason.ABORTED] * 3
    assert found[0].token_ids
    assert found[2].token_ids == ()


def test_a_closed_router_refuses_and_ends_its_replicas(fleet, finish):
    router, mortals = fleet(2)

    async def story():
        running = asyncio.create_task(router.generate(GenerationRequest("r", (9, 10), WANTED)))
        await steps(3)
        await router.close()
        with pytest.raises(RuntimeError, match="no rollout replica is left"):
            await router.generate(GenerationRequest("late", (9, 10), WANTED))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    finish(story())
    assert not any(mortal.alive for mortal in mortals)


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr("hone.processes.restarts.FIRST_PAUSE_S", 0.0)


@pytest.mark.parametrize("others", [0, 3, 8])
def test_a_request_that_makes_replicas_die_fails_alone_and_by_name(fleet, finish, no_pauses, others):
    """Those that are at its side twice are told apart from it: they end as if nothing had happened."""
    router, mortals = fleet(2)
    alone = finish(mortals[0].engine.generate(GenerationRequest("x", (9, 10), WANTED)))
    for mortal in mortals:
        generate = mortal.generate

        async def deadly(request, mortal=mortal, generate=generate):
            if request.id.startswith("poison"):
                await steps(3)
                await mortal.die()
            return await generate(request)

        mortal.generate = deadly

    async def story():
        running = [
            asyncio.create_task(router.generate(GenerationRequest(f"r{i}", (9, 10), WANTED))) for i in range(others)
        ]
        with pytest.raises(PoisonRequest, match=r"'poison' is not sent again: [23] replicas died with it"):
            await router.generate(GenerationRequest("poison", (9, 10), WANTED))
        found = await asyncio.gather(*running)
        await router.revived()
        return found

    assert {c.token_ids for c in finish(story())} <= {alone.token_ids}
    assert sum(mortal.starts for mortal in mortals) <= 3
    assert len(router.serving) == 2


def test_a_request_that_is_aborted_after_its_last_token_is_complete(fleet, finish):
    """It is not sent again with nothing left to sample."""
    router, (mortal,) = fleet(1)

    async def aborted_late(request):
        ids = tuple(range(10, 10 + request.sampling.max_tokens))
        return Completion(request.id, ids, (-1.0,) * len(ids), (0,) * len(ids), StopReason.ABORTED)

    mortal.generate = aborted_late
    found = finish(router.generate(GenerationRequest("r", (9, 10), replace(WANTED, max_tokens=4))))
    assert (found.token_ids, found.stop_reason) == ((10, 11, 12, 13), StopReason.LENGTH)


def test_the_wait_for_a_seat_stops_the_deadline_of_an_episode(fleet, finish):
    router, _ = fleet(1, requests_per_replica=1)

    async def episode(number, deadlines):
        async with Deadline(3600) as deadlines[number]:
            return await router.generate(GenerationRequest(f"r{number}", (9, 10), WANTED))

    async def story():
        deadlines = {}
        first = asyncio.create_task(episode(0, deadlines))
        await steps()
        second = asyncio.create_task(episode(1, deadlines))
        await steps()
        seen = [deadlines[0].stands_still, deadlines[1].stands_still]
        await first
        await steps()
        return [*seen, deadlines[1].stands_still, len((await second).token_ids)]

    assert finish(story()) == [False, True, False, 40]
