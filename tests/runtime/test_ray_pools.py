"""Roles on pools of their own: the figures of colocated ones, errors that name pool and role."""

from contextlib import nullcontext

import pytest

from hone.config import ConfigError, load
from hone.runtime import ray as runtime
from hone.runtime.base import WorkerFailed
from hone.runtime.settings import PoolSettings, RaySettings, RuntimeConfig
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from hone.workers.hosts import cluster as cluster_hosts
from tests.runtime.workers import Echo, Killed, Spec
from tests.trainers.tiny import PPO, metrics, recipe

pytestmark = pytest.mark.slow

STEPS = ["run.steps=2", "actor.max_tokens_per_microbatch=64", "evaluation.every_steps=0"]
RAY = ["runtime.backend=ray", "runtime.backend.devices=2"]
FULL_KL = {"algorithm": {**PPO["algorithm"], "kl": {"kind": "full", "where": "in_loss", "coef": 0.1}}}


def train(folder, given, *changes):
    run_policy(load(PolicyRunConfig, recipe(folder, *changes), [*STEPS, *given]))
    return metrics(folder / "run")


def assert_close(one, other):
    assert len(one) == len(other) == 3
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(mine[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5) for name in theirs)


def test_a_run_on_pools_is_that_of_one_process(tmp_path):
    """Actor on two ranks, the other roles on one of their own: hidden states and weights cross from pool to pool.

    Every process of the run traces step 2.
    """
    pools = ["runtime.backend.pools.judges.devices=1", "runtime.backend.pools.judges.roles=[reference, critic]"]
    given, changes = [*RAY, *pools, "profile.steps=2"], (PPO, FULL_KL)
    assert_close(train(tmp_path / "ray", given, *changes), train(tmp_path / "local", [], *changes))
    names = ["step-2-judges-rank-0.json", "step-2-rank-0.json", "step-2-rank-1.json", "step-2.json"]
    assert sorted(path.name for path in (tmp_path / "ray" / "run" / "profile").iterdir()) == names


def test_servers_in_a_pool_of_this_machine_are_reached_by_socket_and_memory(tmp_path, monkeypatch):
    rollout = {"sampling": {"max_response_tokens": 3}, "builtin": {"process": "separate"}, "replicas": 2}
    sections = {"rollout": rollout, "weights": {"transport": "ipc", "verify": "probe"}}
    pool = ["runtime.backend=ray", "runtime.backend.pools.rollout.devices=2"]
    found, placed = [], cluster_hosts.ClusterHost.open

    async def noting(host):
        site = await placed(host)
        found.append((host.machine, host._port, host.is_shared, type(host.connector(limit=1)).__name__))
        return site

    monkeypatch.setattr(cluster_hosts.ClusterHost, "open", noting)
    rows = train(tmp_path / "pool", pool, sections)
    assert found == [("", 0, False, "UnixConnector")] * 2
    assert [row["correction/max_abs_difference"] < 1e-4 for row in rows[1:]] == [True, True]
    one = train(tmp_path / "local", [])
    for name in ("reward/mean", "train/loss", "train/grad_norm"):
        assert [row.get(name) for row in rows] == pytest.approx([row.get(name) for row in one], abs=1e-5), name


def test_a_pool_for_a_role_that_the_run_has_not(tmp_path):
    with pytest.raises(ConfigError, match=r"runtime\.backend\.pools\.refrence\.devices \(set by command line\)"):
        train(tmp_path, [*RAY, "runtime.backend.pools.refrence.devices=2"])


def test_a_role_lies_on_one_pool():
    with pytest.raises(ValueError, match="pools reference and judges both name the role 'reference'"):
        RaySettings(pools={"reference": PoolSettings(), "judges": PoolSettings(roles=["critic", "reference"])})


def place(role, worker_class, backend):
    config = RuntimeConfig(backend=backend, threads=1)
    return runtime.RayWorkerGroup.place(role, worker_class, Spec(), config, lambda _: nullcontext())


def test_roles_share_the_run_s_pool_or_have_their_own_and_errors_name_it(capfd):
    backend = RaySettings(pools={"judges": PoolSettings(devices=2, roles=["critic", "reference"])})
    actor, critic, reference = (
        place(role, Killed if role == "critic" else Echo, backend) for role in ("actor", "critic", "reference")
    )
    assert critic._pool is reference._pool
    assert critic._pool is not actor._pool
    processes = [rank.facts.process for pool in (actor._pool, critic._pool) for rank in pool._ranks]
    assert len(set(processes)) == 3
    with pytest.raises(WorkerFailed, match=r"role critic \(pool judges\): rank 1 of 2 on node 127.0.0.1 .* was lost"):
        critic.call("train_batch", None, None)
    assert "still here" in capfd.readouterr().err
    with pytest.raises(WorkerFailed, match=r"role reference \(pool judges\) has no ranks any more"):
        reference.call("where", "x")
    assert actor.call("where", "x") == ("x", 0)  # it is not of that pool


def test_too_few_devices_name_the_pool():
    backend = RaySettings(pools={"judges": PoolSettings(nodes=2, roles=["critic"])}, start_timeout_s=0.5)
    backend = backend.model_copy(update={"address": "local"})
    message = r"runtime\.backend\.pools\.judges: the cluster did not have 2 node\(s\) with 1 free device"
    with pytest.raises(ConfigError, match=message):
        place("critic", Echo, backend)


def test_the_number_of_devices_is_a_setting_of_the_backend(tmp_path):
    with pytest.raises(
        ConfigError, match=r"unknown key 'runtime\.devices'; did you mean 'runtime\.backend\.devices'\?"
    ):
        train(tmp_path, ["runtime.backend=ray", "runtime.devices=8"])
