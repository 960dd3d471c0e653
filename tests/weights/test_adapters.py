"""An adapter after its base: over every transport, bit for bit, and nothing resumes between the two."""

import pytest
import torch

from hone.weights.base import AdapterTensors
from hone.weights.digests.packed import size_of
from tests.weights.test_transports import MAKE, every_transport, plain, run

PAYLOAD = AdapterTensors("policy", {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["layer"]})


def adapter():
    return {
        f"base_model.model.layer.{i}.lora_{part}.weight": torch.randn(*shape)
        for i in range(8)
        for part, shape in (("A", (2, 64)), ("B", (40, 2)))
    }


@every_transport
def test_base_then_adapters_each_as_it_is(transport, replicas):
    """Names change from the base to the adapter: `delta` has nothing to compare with then, and sends it whole."""
    replica, base = replicas("r0", ranks=2), plain()

    async def body(manager):
        manager.add_replica(replica)
        await manager.sync(base.items(), 1, resume=False)
        assert replica.asked == ["pause keep"], "the base is nothing to sample from"
        for version in (1, 2, 3):
            tensors = adapter()
            metrics = await manager.sync(tensors.items(), version, PAYLOAD)
            assert replica.facts == {name: (str(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
            assert manager.versions == {"r0": version}
            assert metrics["weights/tensors"].value == len(tensors)
            if "delta" not in transport:
                assert metrics["weights/bytes"].value == sum(map(size_of, tensors.values()))
        assert replica.asked == ["pause keep", *(["pause keep", "resume"] * 3)]

    run(MAKE[transport](), body)


@pytest.mark.parametrize("transport", ["ipc"])
def test_an_adapter_whose_bit_flips_is_caught(transport, replicas):
    replica, tensors = replicas("r0"), adapter()
    name = next(iter(tensors))

    async def body(manager):
        manager.add_replica(replica)
        await manager.sync(tensors.items(), 1, PAYLOAD)
        replica.fault = f"keeps:{name}"
        changed = {**tensors, name: tensors[name] + 1}
        with pytest.raises(Exception, match="a tensor was lost, stale or changed on the way"):
            await manager.sync(changed.items(), 2, PAYLOAD)
        assert manager.versions == {}

    run(MAKE[transport](), body)
