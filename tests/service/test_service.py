"""The service over plain HTTP: what is served, in which order, for whom, and what is refused."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from itertools import pairwise
from random import Random

import numpy as np
import openai
import pyarrow as pa
import pytest

from tests.service.conftest import PROGRAM, Client, Server, parsed

TEXT = [10, 11, 12, 13, 14, 15]
DATUM = (TEXT[:-1], {"target_tokens": TEXT[1:], "weights": [1.0] * 5})


def datum(seed, length=6):
    tokens = np.random.default_rng(seed).integers(8, 90, length).tolist()
    return tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * (length - 1)}


def test_a_model_learns_and_its_snapshot_stays_what_it_was(client):
    session = client.session()
    model = client.model(session)
    status, info = client.post("get_info", model_id=model)
    assert (status, info["lora_rank"], info["model_data"]["model_name"]) == (200, 4, "tiny")
    losses = []
    for number in range(1, 9, 2):
        losses.append(client.trained(model, number, [DATUM])[1]["loss:sum"])
        assert client.step(model, number + 1, learning_rate=0.02)["metrics"]["skipped:sum"] == 0
    assert all(after < before for before, after in pairwise(losses))
    saved = client.do("save_weights_for_sampler", model_id=model, seq_id=9, sampling_session_seq_id=0)
    logprobs, metrics = client.trained(model, 10, [DATUM], forward_only=True)
    _, first = client.sample(saved["sampling_session_id"], 0, TEXT, prompt_logprobs=True)
    prompt = np.frombuffer(first.prompt_logprobs, "<f4")
    assert np.isnan(prompt[0])
    assert np.abs(prompt[1:] - logprobs[0]).max() < 1e-5  # the snapshot is the model
    assert metrics["loss:sum"] == pytest.approx(-float(logprobs[0].sum()), abs=1e-5)
    client.trained(model, 11, [DATUM])
    client.step(model, 12, learning_rate=0.1)
    _, second = client.sample(saved["sampling_session_id"], 1, TEXT, prompt_logprobs=True)
    assert second.prompt_logprobs == first.prompt_logprobs


def test_commands_that_arrive_in_any_order_run_in_theirs(client):
    session = client.session()
    model = client.model(session)
    requests = [client.train(model, number, [datum(number)]) for number in (3, 2)]
    again = client.train(model, 3, [datum(3)])
    assert again == requests[0]  # the same command
    assert client.train(model, 3, [datum(4)])[0] == 400  # another one of its number
    requests.append(client.train(model, 1, [datum(1)]))
    assert all(isinstance(client.result(*one), bytes) for one in requests)
    assert client.step(model, 4, learning_rate=0.01)["metrics"]["grad_norm:mean"] > 0
    other = client.model(session, 1)  # the same in order ends with the same bits
    for number in (1, 2, 3):
        client.trained(other, number, [datum(number)])
    client.step(other, 4, learning_rate=0.01)
    found = [client.trained(one, 5, [DATUM], forward_only=True) for one in (model, other)]
    assert found[0][0][0].tobytes() == found[1][0][0].tobytes()


def test_two_tenants_of_different_ranks_get_the_bits_of_running_alone(server, client):
    theirs = Client(server, server.add_key("theirs"))
    plans = [(client, 4), (theirs, 16)]

    def commands(who, rank, model):
        for number in range(6):
            yield lambda n=2 * number + 1: who.train(model, n, [datum(100 * rank + n, 5 + n)])
            yield lambda n=2 * number + 2: who.post(
                "optim_step", model_id=model, seq_id=n, adam_params={"learning_rate": 0.01, "grad_clip_norm": 1.0}
            )

    def ends(order):
        models = [who.model(who.session(), rank=rank) for who, rank in plans]
        runs = [list(commands(who, rank, model)) for (who, rank), model in zip(plans, models, strict=True)]
        answers = [[], []]
        for index in order:
            answers[index].append(runs[index].pop(0)())
        for (who, _), each in zip(plans, answers, strict=True):
            found = [who.result(*one) for one in each]
            assert all(isinstance(one, bytes) or "metrics" in one for one in found)
        last = [
            who.trained(model, 13, [DATUM], forward_only=True)[0][0]
            for (who, _), model in zip(plans, models, strict=True)
        ]
        return [one.tobytes() for one in last]

    order = [0] * 12 + [1] * 12
    alone = ends(order)
    Random(3).shuffle(order)
    assert ends(order) == alone


def test_commands_that_are_ready_together_share_a_forward_where_that_is_set(client, tmp_path):
    ranks = (4, 16, 2)
    alone = [client.model(client.session(), rank=rank) for rank in ranks[:2]]
    wanted = [client.trained(model, 1, [datum(number, 9)]) for number, model in enumerate(alone)]
    server = Server(tmp_path, training={"compute_dtype": "float32", "share_forwards": True})
    try:
        sharing = Client(server, server.add_key("sharing", "--tokens-per-minute", "960"))
        models = [sharing.model(sharing.session(), rank=rank) for rank in ranks]
        sharing.trained(models[2], 1, [datum(9, 200)] * 5, forward_only=True)  # its tokens of the next seconds
        sent = [sharing.train(model, 1, [datum(number, 9)]) for number, model in enumerate(models[:2])]
        unknown = sharing.train(models[2], 2, [([5, 10**6], {"target_tokens": [5, 5]})])
        for one, (rows, metrics) in zip(sent, wanted, strict=True):
            found = parsed(sharing.result(*one))
            assert found[1]["models_in_forward:mean"] == 2
            assert found[1]["loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-5)
            np.testing.assert_allclose(found[0][0], rows[0], rtol=1e-4, atol=1e-6)
        assert "token 1000000" in sharing.result(*unknown)["error"]
        norms = [
            who.step(model, 2, learning_rate=0.01, grad_clip_norm=1.0)["metrics"]["grad_norm:mean"]
            for who, model in ((client, alone[0]), (sharing, models[0]), (client, alone[1]), (sharing, models[1]))
        ]
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)
        assert norms[3] == pytest.approx(norms[2], rel=1e-4)
        assert "no step was made" in sharing.step(models[2], 3)["error"]
    finally:
        server.close()


def test_a_failed_command_says_why_and_no_step_follows_it(client):
    model = client.model(client.session())
    client.trained(model, 1, [DATUM])
    failed = client.trained(model, 2, [DATUM], loss="stable_reinforce")
    assert failed["category"] == "user"
    assert "choose importance_sampling or cispo" in failed["error"]
    refused = client.step(model, 3, learning_rate=0.1)
    assert "forward_backward (seq_id 2) failed" in refused["error"]
    alone = client.trained(model, 4, [DATUM])
    assert "error" not in client.step(model, 5, learning_rate=0.01)
    assert client.trained(model, 6, [DATUM], forward_only=True)[1]["loss:sum"] < alone[1]["loss:sum"]


def test_what_cannot_be_read_takes_its_place_and_the_next_commands_run(client):
    model = client.model(client.session())
    assert "no tokens" in client.trained(model, 1, [([], {"target_tokens": np.zeros(0, np.int64)})])["error"]
    refused = client.do("load_weights", model_id=model, seq_id=2, path="any", weights_access_token="x")
    assert "weights_access_token" in refused["error"]
    assert "forward_backward (seq_id 1) failed" in client.step(model, 3)["error"]
    client.trained(model, 4, [DATUM])
    assert "eps = 0.0" in client.step(model, 5, eps=0.0)["error"]
    assert "error" not in client.step(model, 6)


def test_a_folder_is_served_by_one_process(server):
    command = [sys.executable, "-c", PROGRAM, "serve", str(server.file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "another process serves" in done.stderr


def test_a_step_that_is_refused_drops_its_gradients(client):
    session, found = client.session(), []
    for number, refused in enumerate((False, True)):
        model, seq = client.model(session, number), 1
        if refused:
            client.trained(model, 1, [DATUM])
            assert client.do("optim_step", model_id=model, seq_id=2, adam_params={"beta1": 7})["category"] == "user"
            seq = 3
        client.trained(model, seq, [DATUM])
        client.step(model, seq + 1, learning_rate=0.1)
        found.append(client.trained(model, seq + 2, [DATUM], forward_only=True)[0][0].tobytes())
    assert found[0] == found[1]


def test_a_model_that_could_not_be_made_is_made_in_its_place(client):
    session = client.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    failed = client.post("create_model", lora_config={"rank": 10**6, "seed": 1}, **body)
    waiting = client.train(f"{session}:train:0", 1, [DATUM])
    assert "is served here" in client.result(*failed)["error"]
    if waiting[0] == 200:  # it came before the model had failed
        assert "could not be made" in client.result(*waiting)["error"]
    model = client.model(session)
    assert "error" not in client.trained(model, 1, [DATUM])


def test_data_as_long_as_the_context_are_trained_and_longer_ones_refused(client):
    session = client.session()
    model = client.model(session)
    (tiny,) = client.call("GET", "get_server_capabilities")[1]["supported_models"]
    longest = tiny["max_context_length"]
    client.trained(model, 1, [datum(1, longest + 1)])  # the last target takes no place
    error = client.trained(model, 2, [datum(1, longest + 2)])["error"]
    assert f"data[0] has {longest + 1} tokens; at most {longest} are trained here" in error


def test_a_state_of_another_rank_is_refused_without_the_folder_of_the_service(client):
    session = client.session()
    path = client.do("save_weights", model_id=client.model(session, rank=4), seq_id=1, path="four")["path"]
    error = client.do("load_weights", model_id=client.model(session, 1, rank=8), seq_id=1, path=path)["error"]
    assert "the checkpoint" in error
    assert "/" not in error.replace("/model.", "")


def test_a_state_is_loaded_with_its_optimizer_or_without(client):
    session = client.session()
    model = client.model(session)
    for number in (1, 3):
        client.trained(model, number, [DATUM])
        client.step(model, number + 1, learning_rate=0.02)
    path = client.do("save_weights", model_id=model, seq_id=5, path="here")["path"]
    assert "there is a checkpoint" in client.do("save_weights", model_id=model, seq_id=6, path="here")["error"]
    assert client.post("weights_info", tinker_path=path)[1]["lora_rank"] == 4

    def go_on(model, first):
        client.trained(model, first, [DATUM])
        client.step(model, first + 1, learning_rate=0.02)
        return client.trained(model, first + 2, [DATUM], forward_only=True)[0][0].tobytes()

    loaded = [
        client.do("load_weights", session_id=session, model_seq_id=number, path=path, optimizer=optimizer)["model_id"]
        for number, optimizer in ((1, True), (2, False))
    ]
    whole, fresh = (go_on(one, 1) for one in loaded)
    assert whole == go_on(model, 7)
    assert fresh != whole
    assert client.call("GET", "training_runs/x")[0] == 404
    assert [
        one["checkpoint_id"] for one in client.call("GET", f"training_runs/{model}/checkpoints")[1]["checkpoints"]
    ] == ["weights/here"]
    assert client.call("DELETE", f"training_runs/{model}/checkpoints/weights/here")[0] == 200
    assert client.post("weights_info", tinker_path=path)[0] == 404


def test_samples_depend_on_seeds_and_stops_and_prompts_are_scored(client):
    session = client.post(
        "create_sampling_session", session_id=client.session(), sampling_session_seq_id=0, base_model="tiny"
    )[1]["sampling_session_id"]
    drawn, _ = client.sample(session, 0, TEXT, count=3)
    again, _ = client.sample(session, 1, TEXT, count=3)
    other, _ = client.sample(session, 2, TEXT, count=3, sampling_params={"seed": 8})
    assert drawn == again
    assert drawn != other
    assert len({tuple(one) for one in drawn}) == 3
    stopped, message = client.sample(session, 3, TEXT, sampling_params={"stop": [drawn[0][1]]})
    assert (stopped[0], message.sequences[0].stop_reason) == (drawn[0][:2], 0)
    wide = {"data": [], "dtype": "int64", "shape": [5, 2_000_000_000]}
    assert "1 to 128 are served" in client.sample(session, 7, TEXT, target_prompt_logprobs=wide)["error"]
    assert "at most 128" in client.sample(session, 8, TEXT, prompt_alt_tokens_k=10**9)["error"]
    targets = {"data": [TEXT[1], -1, 3, -1, -1], "dtype": "int64", "shape": [5, 1]}
    _, scored = client.sample(
        session,
        4,
        TEXT,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=1,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=2,
    )
    prompt = np.frombuffer(scored.prompt_logprobs, "<f4")
    found = np.frombuffer(scored.target_prompt_logprobs.dense, "<f4")
    assert found[0] == prompt[1]
    assert found[1] == 0
    assert found[2] < 0
    assert (scored.topk_prompt_logprobs.length, scored.topk_prompt_logprobs.k) == (6, 2)
    assert scored.sequences[0].topk_sampled_logprobs.length == 4
    assert list(scored.prompt_alt_tokens.tokens.shape) == [5, 2]
    assert (
        "record_stability_info"
        in client.post("asample", **{**asked(session), "record_stability_info": True})[1]["error"]
    )
    assert "surprise" in client.post("asample", **{**asked(session), "surprise": 1})[1]["error"]


def asked(session, seq=99):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TEXT}]}
    return {"sampling_session_id": session, "seq_id": seq, "prompt": prompt, "sampling_params": {"max_tokens": 2}}


def test_many_snapshots_are_sampled_at_once_and_each_answers_for_itself(client):
    session = client.session()
    snapshots = []
    for number in range(3):
        model = client.model(session, number, rank=2 + number, seed=number)
        client.trained(model, 1, [datum(number)])
        client.step(model, 2, learning_rate=0.2)
        made = client.do("save_weights_for_sampler", model_id=model, seq_id=3, path="named")["path"]
        body = {"session_id": session, "sampling_session_seq_id": number, "model_path": made}
        snapshots.append(client.post("create_sampling_session", **body)[1]["sampling_session_id"])
    alone = [client.sample(one, 0, TEXT, count=4)[0] for one in snapshots]
    assert len({json.dumps(one) for one in alone}) == 3
    with ThreadPoolExecutor(12) as pool:
        jobs = [
            (index, pool.submit(client.sample, snapshots[index], seq, TEXT, 4))
            for seq in range(1, 9)
            for index in range(3)
        ]
        for index, job in jobs:
            assert job.result()[0] == alone[index]


def test_an_inflight_client_samples_from_the_newest_weights(client):
    session = client.session()
    model = client.model(session)
    saved = client.do("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=0, kind="inflight")
    first, _ = client.sample(saved["sampling_session_id"], 0, TEXT)
    client.trained(model, 2, [DATUM])
    client.step(model, 3, learning_rate=1.0)
    client.do("save_weights_for_sampler", model_id=model, seq_id=4, sampling_session_seq_id=1, kind="inflight")
    second, _ = client.sample(saved["sampling_session_id"], 1, TEXT)
    assert first != second
    # weights that are saved while a request waits: it is answered by them
    opened = client.post("create_sampling_session", session_id=session, sampling_session_seq_id=9, base_model="tiny")
    base = opened[1]["sampling_session_id"]
    body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXT}]}, "num_samples": 8}
    client.post("asample", sampling_session_id=base, seq_id=0, sampling_params={"max_tokens": 40}, **body)
    asked = client.post(
        "asample", sampling_session_id=saved["sampling_session_id"], seq_id=2, sampling_params={"max_tokens": 4}, **body
    )
    client.do("save_weights_for_sampler", model_id=model, seq_id=5, sampling_session_seq_id=2, kind="inflight")
    assert isinstance(client.result(*asked), bytes)
    # and while requests run that need the snapshot more than once
    more = {"sampling_session_id": saved["sampling_session_id"], "prompt_logprobs": True, **body}
    running = [client.post("asample", seq_id=seq, sampling_params={"max_tokens": 30}, **more) for seq in range(3, 9)]
    for seq in (6, 7):
        client.do("save_weights_for_sampler", model_id=model, seq_id=seq, sampling_session_seq_id=seq, kind="inflight")
    found = [client.result(*one) for one in running]
    assert all(isinstance(one, bytes) for one in found), found


def test_a_sampling_request_with_the_number_of_another_one_is_refused(client):
    session = client.session()
    opened = client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny")
    sampler = opened[1]["sampling_session_id"]
    first = client.post("asample", **asked(sampler))
    assert client.post("asample", **asked(sampler)) == first
    other = {**asked(sampler), "sampling_params": {"max_tokens": 3}}
    status, found = client.post("asample", **other)
    assert (status, "used for another request" in found["error"]) == (400, True)


def test_a_sampling_session_with_the_number_of_another_one_is_refused(client):
    session = client.session()
    place, model = {"session_id": session, "sampling_session_seq_id": 0}, client.model(session)
    saved = client.do("save_weights_for_sampler", model_id=model, seq_id=1, path="named")
    first = client.post("create_sampling_session", **place, base_model="tiny")
    assert client.post("create_sampling_session", **place, base_model="tiny") == first
    status, found = client.post(
        "create_sampling_session", **place, model_path=saved["path"]
    )  # or it would get the base
    assert (status, "used for another request" in found["error"]) == (400, True)
    found = client.do("save_weights_for_sampler", model_id=model, seq_id=2, sampling_session_seq_id=0)
    assert "used for another request" in found["error"]


def test_a_run_that_began_with_a_checkpoint_that_is_not_there_is_none(client):
    session, path = client.session(), "tinker://nobody/weights/nothing"
    assert "no checkpoint" in client.do("load_weights", session_id=session, model_seq_id=0, path=path)["error"]
    assert client.call("GET", f"training_runs/{session}:train:0")[0] == 404
    status, found = client.call("GET", "training_runs?limit=1000")
    assert (status, [one for one in found["training_runs"] if session in one["training_run_id"]]) == (200, [])


def test_a_tenant_sees_nothing_of_another(server, client):
    stranger = Client(server, server.add_key("stranger"))
    session = client.session()
    model = client.model(session)
    saved = client.do("save_weights_for_sampler", model_id=model, seq_id=1, path="mine")
    request = client.post("optim_step", model_id=model, seq_id=2, adam_params={})[1]["request_id"]
    path = saved["path"]
    for call in (
        ("retrieve_future", {"request_id": request}),
        ("session_heartbeat", {"session_id": session}),
        (f"sessions/{session}/finish", {"reason": {"type": "success"}}),
        ("get_info", {"model_id": model}),
        ("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}}),
        ("weights_info", {"tinker_path": path}),
        ("asample", {**asked("x"), "sampling_session_id": None, "model_path": path}),
    ):
        known = stranger.post(call[0], **{name: value for name, value in call[1].items() if value is not None})
        assert known[0] in (404, 410), call
    assert stranger.call("GET", "training_runs")[1]["training_runs"] == []
    for key in ("", "tml-nobody", client.key[:-1], client.key + "x", f"Bearer {client.key}"):
        assert Client(server, key).post("create_session")[0] == 401


def test_limits_of_tenants_and_requests(server, client):
    little = Client(
        server, server.add_key("little", "--adapters", "1", "--tokens-per-minute", "100", "--bytes", "1000")
    )
    session = little.session()
    model = little.model(session)
    status, refused = little.post(
        "create_model", session_id=session, model_seq_id=1, base_model="tiny", lora_config={"rank": 1}
    )
    assert status == 400
    assert "1 open models" in refused["error"]
    assert "may store 1,000" in little.do("save_weights", model_id=model, seq_id=1, path="big")["error"]
    unnamed = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 5}
    assert "may store 1,000" in little.do("save_weights_for_sampler", **unnamed)["error"]
    little.trained(model, 3, [datum(0, 120)])
    sampling = little.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny")
    assert little.post("asample", **asked(sampling[1]["sampling_session_id"]))[0] == 429
    waiting = little.post("optim_step", model_id=model, seq_id=4, adam_params={})
    assert "metrics" in little.result(*waiting)  # after some seconds, when the bucket has room again
    assert announced(client, 1 << 40) == 413
    assert client.call("POST", "create_session", b"{" * 100)[0] == 400
    bomb = pa.Codec("zstd").compress(b"\0" * (1 << 29), asbytes=True)
    assert (
        client.call("POST", "forward_backward", bomb, "application/x-protobuf", **{"Content-Encoding": "zstd"})[0]
        == 413
    )


def announced(client, size):
    """The status of a request that says it has so many bytes."""
    connection = HTTPConnection(client.server.url.removeprefix("http://"), timeout=60)
    connection.putrequest("POST", "/api/v1/create_session")
    connection.putheader("X-API-Key", client.key)
    connection.putheader("Content-Length", str(size))
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("copy_weights", "load a checkpoint"),
        ("create_custom_loss", "in the client"),
        ("cancel_future", "finish its session"),
        ("sessions/search", "list training_runs"),
        ("sessions/any/project", "no projects"),
        ("nothing_like_it", "not served"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client, path, named):
    for method in ("GET", "POST"):
        status, found = client.call(method, path, {} if method == "POST" else None)
        assert status in (400, 404)
        assert named in found["error"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"base_model": "other"}, "there is tiny"),
        ({"lora_config": {"rank": 999}}, "at most 256"),
        ({"lora_config": {"rank": 2, "train_mlp": False, "train_attn": False}}, "unembedding"),
        ({"lora_config": None}, "whole_weights"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "dimuon"),
    ],
)
def test_models_that_are_not_served_are_refused_by_name(client, changes, named):
    body = {"session_id": client.session(), "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    status, found = client.post("create_model", **{**body, **changes})
    found = client.result(status, found) if status == 200 else found
    assert named in found["error"]


def test_layers_are_chosen_and_an_export_is_fetched_without_a_key(server, client):
    model = client.model(client.session(), train_mlp=False)
    saved = client.do("save_weights_external", model_id=model, seq_id=1, path="out")
    assert saved["size_bytes"] > 0
    run, kind, name = saved["path"].removeprefix("tinker://").split("/")
    route = f"training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls"
    urls = client.call("GET", route, **{"X-Forwarded-Proto": "https"})[1]["urls"]
    assert urls["adapter_config.json"].startswith(server.url.replace("http:", "https:"))  # a proxy ends TLS
    path = urls["adapter_config.json"].partition("/api/v1/")[2]
    config = Client(server, "").call("GET", path)[1]
    assert set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert Client(server, "").call("GET", path.replace("external/", "external/x"))[0] == 404


def test_whole_weights_of_one_client_are_trained_sampled_and_there_after_a_kill(tmp_path):
    training = {"compute_dtype": "float32", "whole_weights": True}
    server = Server(tmp_path, training=training, limits={"metadata_bytes": 64})
    try:
        client = Client(server)
        session = client.session()
        whole = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": None}
        model = client.do("create_model", **whole)["model_id"]
        refused = client.post("create_model", **{**whole, "model_seq_id": 1, "lora_config": {"rank": 2}})
        assert "takes this service alone" in refused[1]["error"]
        before, _ = client.trained(model, 1, [DATUM])
        client.step(model, 2, learning_rate=1e-2)
        saved = client.do("save_weights_for_sampler", model_id=model, seq_id=3, path="whole")
        asked = client.train(model, 4, [DATUM], forward_only=True)
        # a large result is announced once, and then sent
        large = {"request_id": asked[1]["request_id"], "allow_metadata_only": True}
        while (found := client.post("retrieve_future", **large))[0] == 408:
            pass
        assert found[1]["status"] == "complete_metadata"
        reply = client.post("retrieve_future", **large)[1]
        assert len(reply) == found[1]["response_payload_size"] > 64
        after, _ = parsed(reply)
        assert np.abs(after[0] - before[0]).max() > 1e-3
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved["path"]}
        opened = client.post("create_sampling_session", **sampler)[1]["sampling_session_id"]
        _, message = client.sample(opened, 0, TEXT, prompt_logprobs=True)
        np.testing.assert_allclose(np.frombuffer(message.prompt_logprobs, "<f4")[1:], after[0], atol=1e-5)
        server.kill()
        server.start()
        again, _ = client.trained(model, 5, [DATUM], forward_only=True)
        assert again[0].tobytes() == after[0].tobytes()
    finally:
        server.close()


def test_a_checkpoint_gets_a_time_to_live_and_is_never_published(client):
    model = client.model(client.session())
    path = client.do("save_weights", model_id=model, seq_id=1, path="short", ttl_seconds=3600)["path"]
    run, kind, name = path.removeprefix("tinker://").split("/")
    route = f"training_runs/{run}/checkpoints"

    def expires():
        (one,) = client.call("GET", route)[1]["checkpoints"]
        return one["expires_at"]

    assert expires() is not None
    assert client.call("PUT", f"{route}/{kind}/{name}/ttl", {"ttl_seconds": None})[0] == 200
    assert expires() is None
    assert client.call("PUT", f"{route}/{kind}/{name}/ttl", {"ttl_seconds": 5})[0] == 400  # at least an hour
    assert "not published" in client.post(f"{route}/{kind}/{name}/publish")[1]["error"]
    unnamed = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0, "ttl_seconds": 3600}
    assert "ttl_seconds is of a checkpoint with a path" in client.do("save_weights_for_sampler", **unnamed)["error"]


def test_a_session_that_ended_is_gone_and_its_checkpoints_stay(client):
    session = client.session()
    model = client.model(session)
    path = client.do("save_weights", model_id=model, seq_id=1, path="kept")["path"]
    waiting = client.train(model, 3, [DATUM])  # 2 never comes
    assert client.post("session_heartbeat", session_id=session)[0] == 200
    assert client.post(f"sessions/{session}/finish", reason={"type": "success"})[0] == 200
    assert client.post("session_heartbeat", session_id=session)[0] == 410
    assert "the session has ended" in client.result(*waiting)["error"]
    assert client.post("optim_step", model_id=model, seq_id=4, adam_params={})[0] == 410
    fresh = client.session()
    assert client.do("load_weights", session_id=fresh, model_seq_id=0, path=path, optimizer=True)["path"] == path


def test_openai_clients_ask_the_base_and_every_snapshot(server, client):
    session = client.session()
    model = client.model(session)
    client.trained(model, 1, [DATUM])
    client.step(model, 2, learning_rate=1.0)
    path = client.do("save_weights_for_sampler", model_id=model, seq_id=3, path="asked")["path"]
    with openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key=client.key, max_retries=0) as asked:
        assert {"tiny", path} <= {one.id for one in asked.models.list().data}
        texts = {
            name: asked.completions.create(model=name, prompt=TEXT, max_tokens=6, temperature=0).choices[0].text
            for name in ("tiny", path, f"tiny;{path}")
        }
        assert texts[path] == texts[f"tiny;{path}"] != texts["tiny"]
        chat = asked.chat.completions.create(
            model=path, messages=[{"role": "user", "content": "hello"}], max_tokens=4, temperature=0
        )
        assert chat.usage.completion_tokens <= 4
        with pytest.raises(openai.NotFoundError):
            asked.completions.create(model=path + "x", prompt=TEXT)
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="tml-nobody", max_retries=0) as nobody,
        pytest.raises(openai.AuthenticationError),
    ):
        nobody.models.list()
