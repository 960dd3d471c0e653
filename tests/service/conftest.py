"""A service in a process of its own, and clients of it."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from itertools import pairwise

import numpy as np
import pytest
import yaml

from hone.service.protocol.wire import INT64, MESSAGES, NUMPY

PROGRAM = "import sys; from hone.cli.main import main; sys.exit(main(sys.argv[1:]))"
MODEL = {"build": {"hidden_size": 32, "layers": 2, "heads": 2, "mlp_size": 64, "max_positions": 256}}


class Server:
    """`hone serve RUN.yaml`."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.file = folder / "serve.yaml"
        run = {"kind": "serve", "model": MODEL, "names": ["tiny"], "folder": str(folder / "run"), "listen": {"port": 0}}
        run |= {"limits": {"models": 100}, "training": {"compute_dtype": "float32"}}  # on every processor
        self.file.write_text(yaml.safe_dump({**run, **settings}))
        self.key = ""
        self.start()

    def start(self):
        command = [sys.executable, "-c", PROGRAM, "serve", str(self.file)]
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        for line in self.process.stdout:
            if line.startswith("key of"):
                self.key = line.split()[-1]
            if line.startswith("serving"):
                self.url = line.split()[-1]
                return
        self.close()
        pytest.fail(f"the service ended: {(self.folder / 'log').read_text()[-2000:]}")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)
        self.process.stdout.close()

    def add_key(self, name, *more):
        command = [sys.executable, "-c", PROGRAM, "serve", "key", "add", name, str(self.file), *more]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


class Client:
    """The protocol in plain HTTP."""

    def __init__(self, server, key=None):
        self.server = server
        self.key = server.key if key is None else key

    def call(self, method, path, body=None, kind="application/json", **headers):
        """Status and answer; JSON is parsed."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"X-API-Key": self.key, "Content-Type": kind, **headers}
        request = urllib.request.Request(f"{self.server.url}/api/v1/{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                status, found, kind = reply.status, reply.read(), reply.headers["content-type"]
        except urllib.error.HTTPError as error:
            status, found, kind = error.code, error.read(), error.headers["content-type"]
        return status, json.loads(found) if kind == "application/json" else found

    def post(self, route, **body):
        return self.call("POST", route, body)

    def result(self, status, answer):
        """The result of a request that was taken."""
        assert status == 200, answer
        for _ in range(10):
            status, found = self.post("retrieve_future", request_id=answer["request_id"])
            if status != 408:
                return found
        pytest.fail(f"{answer} has no result")

    def do(self, route, **body):
        return self.result(*self.post(route, **body))

    def session(self):
        return self.post("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")[1]["session_id"]

    def model(self, session, number=0, rank=4, seed=1, **more):
        lora = {"rank": rank, "seed": seed, **more}
        made = self.do("create_model", session_id=session, model_seq_id=number, base_model="tiny", lora_config=lora)
        return made["model_id"]

    def train(self, *arguments, **named):
        """The answer to a request of `written`."""
        return self.call("POST", "forward_backward", written(*arguments, **named), "application/x-protobuf")

    def trained(self, *arguments, **named):
        """The log-probs of each datum and the metrics, or the error."""
        found = self.result(*self.train(*arguments, **named))
        return found if isinstance(found, dict) else parsed(found)

    def step(self, model, seq, **adam):
        return self.do("optim_step", model_id=model, seq_id=seq, adam_params=adam)

    def sample(self, session, seq, prompt, count=1, **more):
        """The sampled sequences and the whole message, or the error."""
        params = {"max_tokens": 4, "seed": 7, **more.pop("sampling_params", {})}
        body = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]}, "sampling_params": params}
        found = self.do("asample", sampling_session_id=session, seq_id=seq, num_samples=count, **body, **more)
        if isinstance(found, dict):
            return found
        message = MESSAGES["SampleResponse"]()
        message.ParseFromString(found)
        return [np.frombuffer(one.tokens, "<i4").tolist() for one in message.sequences], message


def written(model, seq, data, loss="cross_entropy", forward_only=False):
    """The bytes of a forward_backward request; `data`: (tokens, inputs) of each datum."""
    message = MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only)
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        for name, values in inputs.items():
            array = np.asarray(values)
            tensor = datum.loss_fn_inputs[name]
            tensor.dtype = INT64 if array.dtype.kind == "i" else 1
            tensor.dense = array.astype(NUMPY[tensor.dtype]).tobytes()
            tensor.shape.extend(array.shape)
    return message.SerializeToString()


def parsed(reply):
    """The log-probs of each datum and the metrics of a reply to forward_backward."""
    message = MESSAGES["ForwardBackwardOutput"]()
    message.ParseFromString(reply)
    rows = []
    for record in message.loss_fn_outputs:
        batched = record.fields["logprobs"]
        ends = np.frombuffer(batched.offsets, "<i8") // 4
        flat = np.frombuffer(batched.data, "<f4")
        rows += [flat[a:b].reshape(-1, *batched.trailing_shape) for a, b in pairwise(ends)]
    return rows, dict(message.metrics)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("service"), listen={"port": 0, "behind_proxy": True})
    yield made
    made.close()


@pytest.fixture
def client(server):
    return Client(server)
