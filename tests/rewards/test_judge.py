"""Judges against a real server: scores and weights, pairs, prose, outages, retries, the cache."""

import asyncio
import json
import re
import threading

import pytest
from aiohttp import web

from hone.rewards import judge_client as module
from hone.rewards.base import BadReward, load_reward
from hone.rewards.judge import Judge, JudgeFailed, PairwiseJudge
from hone.rewards.rubric import Rubric
from hone.rewards.settings import RewardConfig
from hone.types import Status

CRITERIA = {"correct": {"says": "It is right.", "weight": 3}, "brief": "It is short."}


class Server:
    """An OpenAI-compatible server in a thread; the answer to judge says what it replies."""

    def __init__(self):
        self.asked = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, daemon=True).start()
        assert self._ready.wait(30)

    def _serve(self):
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _start(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        self._ready.set()

    async def _answer(self, request):
        body = await request.json()
        body["authorization"] = request.headers.get("Authorization")
        self.proxy = request.headers.get("Proxy-Authorization")
        self.asked.append(body)
        if "<first-" in body["messages"][1]["content"]:
            return self._compare(body["messages"][1]["content"])
        said = re.search(r"<answer-\w+>\n(.*)\n</answer", body["messages"][1]["content"], re.DOTALL)[1]
        if said == "busy once" and self.times(said) == 1:
            return web.Response(status=503, text="come back")
        if said == "always busy":
            return web.Response(status=503, text="come back")
        if said == "forbidden":
            return web.Response(status=401, text="no key")
        if said == "silent":
            await asyncio.sleep(60)
        text = said if "{" in said or said == "prose" else '{"correct": 10, "brief": 5}'
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    def _compare(self, content):
        """Prefers the greater number, and the first place where the numbers differ by one at most."""
        first, second = (re.search(rf"<{name}-\w+>\n(.*)\n</", content)[1] for name in ("first", "second"))
        if "prose" in (first, second):
            text = "They are both fine."
        else:
            text = json.dumps({"better": "first" if int(first) >= int(second) - 1 else "second"})
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    def times(self, answer):
        return sum(f"\n{answer}\n" in one["messages"][1]["content"] for one in self.asked)

    def stop(self):
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture(scope="module")
def server():
    found = Server()
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    module._REMEMBERED.clear()
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("JUDGE_KEY", "secret")


def ask(server, answer, truth="4", **options):
    options = {"criteria": CRITERIA, "url": server.url, "model": "m", "api_key_variable": "JUDGE_KEY", **options}
    row = {"messages": [{"role": "user", "content": "2 + 2?"}]}
    return asyncio.run(Judge(**options)(answer, truth, row))


def test_the_reward_is_the_weighted_mean_of_the_criteria(server):
    assert ask(server, "4") == {"reward": (3 * 1.0 + 1 * 0.5) / 4, "correct": 1.0, "brief": 0.5}
    system, user = (one["content"] for one in server.asked[-1]["messages"])
    assert "- correct: It is right." in system
    assert "from 0 (not met) to 10" in system
    assert "user: 2 + 2?" in user
    assert "A correct answer, for comparison:\n4" in user
    assert (server.asked[-1]["authorization"], server.asked[-1]["temperature"]) == ("Bearer secret", 0)
    ask(server, "5", show_ground_truth=False)
    assert "for comparison" not in server.asked[-1]["messages"][1]["content"]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("prose", "answered without a JSON object of scores: 'prose'"),
        ('{"correct": 7}', "gave no number for the criterion 'brief'"),
        ('{"correct": true, "brief": 1}', "gave no number for the criterion 'correct'"),
        ('{"correct": 11, "brief": 1}', "gave 11 for the criterion 'correct'; expected 0 to 10"),
        ('{"correct": 1, "brief"', "answered without a JSON object"),
    ],
)
def test_a_reply_without_all_scores_is_a_failure(server, reply, error):
    with pytest.raises(JudgeFailed, match=re.escape(error)):
        ask(server, reply)


def test_an_outage_is_tried_again_and_then_a_failure(server):
    assert ask(server, "busy once")["correct"] == 1.0
    assert server.times("busy once") == 2
    with pytest.raises(JudgeFailed, match="gave no verdict: HTTP status 503: come back"):
        ask(server, "always busy", retries=2)
    assert server.times("always busy") == 3
    with pytest.raises(JudgeFailed, match="HTTP status 401: no key"):
        ask(server, "forbidden", retries=2)
    assert server.times("forbidden") == 1  # no attempt can help
    with pytest.raises(JudgeFailed, match=r"no reply within 0.1 s"):
        ask(server, "silent", attempt_timeout_s=0.1, retries=0)
    with pytest.raises(JudgeFailed, match="ClientConnectorError"):
        ask(server, "4", url="http://127.0.0.1:1/v1", retries=0)


def test_a_judge_outside_is_asked_by_the_proxy_of_the_environment(server, monkeypatch, tmp_path):
    monkeypatch.setenv("HTTP_PROXY", server.url.removesuffix("/v1").replace("//", "//me:word@"))
    monkeypatch.setenv("NO_PROXY", "direct.invalid")
    (tmp_path / "netrc").write_text("machine outside.invalid login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    ask(server, "by a proxy", url="http://outside.invalid/v1")
    assert (server.asked[-1]["authorization"], server.proxy) == ("Bearer secret", "Basic bWU6d29yZA==")
    ask(server, "on this machine")
    assert server.proxy is None
    with pytest.raises(JudgeFailed, match=r"direct\.invalid"):
        ask(server, "without", url="http://direct.invalid/v1", retries=0)


def test_an_answer_is_judged_once(server, tmp_path):
    first = ask(server, "cached", cache=str(tmp_path))
    assert ask(server, "cached", cache=str(tmp_path)) == first
    assert server.times("cached") == 1
    module._REMEMBERED.clear()  # as in another process: the folder has it
    assert ask(server, "cached", cache=str(tmp_path)) == first
    assert server.times("cached") == 1
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == {"correct": 1.0, "brief": 0.5}
    ask(server, "cached", cache=str(tmp_path), truth="5")  # another task
    assert server.times("cached") == 2


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"criteria": {}}, "criteria is empty"),
        ({"criteria": {"a": {"weight": 1}}}, "criteria.a should be a text"),
        ({"criteria": {"a": {"says": "x", "weight": 0}}}, "criteria.a.weight should be a number above 0, found 0"),
        ({"criteria": {"reward": "x"}}, "a criterion cannot be called reward"),
        ({"criteria": CRITERIA, "scale": 0}, "scale should be at least 1, found 0"),
        ({"criteria": CRITERIA, "scale": "ten"}, "option scale should be a int, found 'ten'"),
        (
            {"criteria": CRITERIA, "retry": 1},
            "unexpected keyword argument 'retry' .*it accepts the options: url, model",
        ),
        ({}, "missing 1 required keyword-only argument: 'criteria'"),
    ],
)
def test_a_wrong_option_is_an_error_at_start_up(options, error):
    with pytest.raises(BadReward, match=f"reward component 'quality': .*{error}"):
        load_reward("quality", "judge", {"url": "http://127.0.0.1:1/v1", "model": "m", **options})


def test_fields_of_the_request_can_be_added_and_removed(server):
    ask(server, "fields", request={"max_tokens": None, "max_completion_tokens": 7})
    assert set(server.asked[-1]) == {"model", "messages", "temperature", "max_completion_tokens", "authorization"}


def test_a_step_has_a_budget_of_calls(group, server):
    """Of three answers the third is refused without a call; `metrics` begins the next step."""
    options = {"url": server.url, "model": "m", "criteria": CRITERIA}
    config = RewardConfig(components={"quality": {"reward": "judge", "options": options, "max_calls_per_step": 2}})

    async def two_steps():
        rubric = Rubric(config)
        await rubric.start()
        try:
            first = await rubric.score(group(["b1", "b2", "b3"], 4))
            metrics = rubric.metrics()
            return first, metrics, await rubric.score(group(["b3"], 4))
        finally:
            await rubric.close()

    first, metrics, second = asyncio.run(two_steps())
    assert [one.status for one in first.trajectories] == [Status.OK, Status.OK, Status.REWARD_FAILED]
    assert first.trajectories[2].error == "quality: its 2 calls of this step are spent (max_calls_per_step)"
    assert metrics["reward/failed"].value == 1
    assert second.trajectories[0].reward == 0.875
    assert [server.times(answer) for answer in ("b1", "b2", "b3")] == [1, 1, 1]


def test_in_a_run_a_failed_judge_is_a_failed_reward_and_never_a_0(score, group, server):
    options = {"url": server.url, "model": "m", "criteria": CRITERIA, "retries": 0}
    components = {"quality": {"reward": "judge", "options": options, "timeout_s": 30}}
    (scored,), metrics = score(components, [group(["4", "prose", "always busy"], 4)])
    good, prose, outage = scored.trajectories
    assert (good.status, good.reward, good.components["quality/brief"]) == (Status.OK, 0.875, 0.5)
    assert (prose.status, outage.status) == (Status.REWARD_FAILED, Status.REWARD_FAILED)
    assert "answered without a JSON object" in prose.error
    assert "HTTP status 503" in outage.error
    assert metrics["reward/failed"] == 2


def compare(server, answers, **options):
    options = {"url": server.url, "model": "m", **options}
    row = {"messages": [{"role": "user", "content": "A great number, please."}]}
    return asyncio.run(PairwiseJudge(**options)(answers, "9", row))


def test_the_reward_of_an_answer_is_its_share_of_wins(server):
    """1 and 2 differ by one, so this judge prefers whichever comes first: each wins once."""
    begun = len(server.asked)
    assert compare(server, ["1", "2", "9", "5"], criteria=["It is great."]) == [1 / 6, 1 / 6, 1.0, 4 / 6]
    assert len(server.asked) - begun == 12
    system, user = (one["content"] for one in server.asked[-1]["messages"])
    assert "Compare them by:\n- It is great.\n" in system
    assert "user: A great number, please." in user
    assert "A correct answer, for comparison:\n9" in user


def test_neighbours_only_and_equal_texts_unasked(server):
    begun = len(server.asked)
    # on a ring 1-3-5-7-9-1: 1 loses to 3 and 9, 3 beats 1 and loses to 5, ..., 9 beats 7 and 1
    assert compare(server, ["1", "3", "5", "7", "9"], opponents=2) == [0.0, 0.5, 0.5, 0.5, 1.0]
    assert len(server.asked) - begun == 10
    assert compare(server, ["40", "40"]) == [0.5, 0.5]
    assert len(server.asked) - begun == 10


def test_a_pair_without_a_preference_fails_its_group(server):
    with pytest.raises(JudgeFailed, match="without a JSON object of the preference: 'They are both fine"):
        compare(server, ["1", "prose", "9"])
    with pytest.raises(JudgeFailed, match="has one answer only"):
        compare(server, ["1"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"opponents": 3}, "opponents should be 0 or an even number, found 3"),
        ({"criteria": "short"}, "criteria should be a list of texts, found 'short'"),
        ({"at_once": 0}, "at_once should be at least 1, found 0"),
        ({"retries": -1}, "retries should be at least 0, found -1"),
    ],
)
def test_bad_options_of_a_judge_of_pairs(options, error):
    with pytest.raises(BadReward, match=error):
        load_reward("better", "pairwise_judge", {"url": "http://127.0.0.1:1/v1", "model": "m", **options})


def test_a_group_is_compared_in_the_processes_of_a_run(server, score, group):
    options = {"url": server.url, "model": "m"}
    (found,), _ = score({"better": {"reward": "pairwise_judge", "options": options}}, [group(["30", "20", "10"], None)])
    assert [one.reward for one in found.trajectories] == [1.0, 0.5, 0.0]
