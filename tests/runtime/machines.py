"""A Ray cluster of several machines on this one: a raylet for each, with an address of its own on loopback."""

import gc
import os
import secrets

import ray
from ray.cluster_utils import Cluster

from hone.runtime.ray_patches import LOOPBACK, TOKEN, forget_token, on_loopback

SECOND, THIRD = "127.0.0.2", "127.0.0.3"


class Machines:
    """The driver is on the first machine; others come and go. `here` and `there` are the CPUs that they offer."""

    def __init__(self, *others, here=1, there=1):
        gc.collect()
        ray.shutdown()  # what other tests of this process have started
        self._users = os.environ.get(TOKEN)
        os.environ[TOKEN] = secrets.token_hex(32)  # a machine on which Ray never ran has no file with a token
        forget_token()
        with on_loopback():
            first = {"num_cpus": here, "node_ip_address": LOOPBACK, "include_dashboard": False}
            self._cluster = Cluster(initialize_head=True, head_node_args=first)
        self.address = self._cluster.address
        self._there = there
        self.others = {}
        for address in others:
            self.add(address)

    def add(self, address):
        with on_loopback():
            self.others[address] = self._cluster.add_node(num_cpus=self._there, node_ip_address=address)

    def lose(self, address):
        self._cluster.remove_node(self.others.pop(address), allow_graceful=False)

    def end(self):
        gc.collect()
        ray.shutdown()
        self._cluster.shutdown()
        if self._users is None:
            del os.environ[TOKEN]
        else:
            os.environ[TOKEN] = self._users
        forget_token()
