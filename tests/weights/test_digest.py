"""The digest of weights: what it must not care about, and everything that it must notice."""

import itertools
import json
import time
import timeit
from functools import partial
from hashlib import blake2b

import numpy as np
import pytest
import torch
import xxhash

from hone.weights.digests import row_digest
from hone.weights.digests.digest import digest_tensors, method_for, new_digest
from hone.weights.digests.packed import pack, place

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool]


def make(dtype, *shape):
    return torch.randint(0, 2, shape).to(dtype) if dtype == torch.bool else (20 * torch.randn(shape)).to(dtype)


@pytest.fixture(params=["rows", "bytes"])
def method(request):
    return request.param


@pytest.fixture
def whole(method):
    """The digest of several tensors."""
    return lambda tensors: digest_tensors(tensors, method)


@pytest.fixture
def one(method):
    """The digest of one tensor."""
    return lambda tensor, name="w": digest_tensors([(name, tensor)], method)


def test_does_not_depend_on_order_strides_or_offset(whole):
    a, b = torch.randn(40, 30), torch.randn(7)
    expected = whole([("a", a), ("b", b)])
    assert whole([("b", b.clone()), ("a", a)]) == expected
    assert whole([("a", a.T.contiguous().T), ("b", torch.stack([b, b], 1)[:, 1])]) == expected
    shifted = torch.zeros(1 + a.numel())
    shifted[1:] = a.flatten()
    assert whole([("a", shifted[1:].view(40, 30)), ("b", b)]) == expected
    assert len(expected) == 32


def test_notices_names_dtypes_and_shapes(whole, one):
    w = torch.zeros(6, 4, dtype=torch.int32)
    kinds = [w, w.view(4, 6), w.flatten(), w.view(torch.float32), w[:5], torch.zeros(6, 5, dtype=torch.int32)]
    assert len({one(tensor) for tensor in kinds}) == len(kinds)
    assert one(w, "w") != one(w, "v")
    assert whole([("a", w), ("b", w + 1)]) != whole([("a", w + 1), ("b", w)])


def test_notices_a_tensor_that_is_not_there_and_empty_ones(whole):
    w, empty = torch.randn(3), torch.zeros(0, 4)
    found = [whole(x) for x in ([], [("w", w)], [("e", empty)], [("w", w), ("e", empty)], [("e", empty.T)])]
    assert len(set(found)) == 5


def test_a_name_that_comes_twice_is_an_error(whole):
    with pytest.raises(ValueError, match="'w' was added twice"):
        whole([("w", torch.zeros(1)), ("w", torch.zeros(1))])


@pytest.mark.slow
def test_does_not_depend_on_which_tensors_come_together(whole, method):
    """Of sizes around each of its limits: 2 KiB rows, 1 MiB that go together, 8 MiB that are added up at once."""
    sizes = [0, 3, 2048, 2049, 100_001, 1_048_576, 1_048_577, 8_388_608, 8_390_656, 9_000_001]
    tensors = [(f"w{size}", make(torch.int8, size)) for size in sizes]
    tensors += [("strided", torch.randn(80, 90).T), ("scalar", torch.tensor(3.0)), ("half", make(torch.bfloat16, 9001))]
    expected = whole(tensors)
    for groups in ([tensors], [tensors[::-1]], [[one] for one in tensors], [tensors[:4], tensors[4:9], tensors[9:]]):
        found = new_digest(method)
        for group in groups:
            found.add_many(group)
        assert found.hexdigest() == expected
    for at, (name, tensor) in enumerate(tensors):
        if tensor.numel():
            changed = tensor.clone()
            changed[(-1,) * changed.dim()] += 1
            assert whole([*tensors[:at], (name, changed), *tensors[at + 1 :]]) != expected, name
    with pytest.raises(ValueError, match="'half' was added twice"):
        new_digest(method).add_many([*tensors, tensors[-1]])


def test_keeps_nothing_of_what_it_was_given(whole, method):
    """What comes may be a view of memory that is written again at once."""
    sizes = {"a": 9, "b": 20_000, "c": 40_000, "d": 1_700_000}
    tensors = {name: make(torch.int8, size) for name, size in sizes.items()}
    expected, found = whole(tensors.items()), new_digest(method)
    for group in ("a", "b"), ("c",), ("d",):
        found.add_many((name, tensors[name]) for name in group)
        for name in group:
            tensors[name].zero_()
    assert found.hexdigest() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 300])
def test_notices_every_single_bit(dtype, size, one):
    w = make(dtype, size)
    seen = {one(w)}
    raw = w.view(torch.uint8)
    bits = range(8) if dtype != torch.bool else range(1)
    places = list(itertools.product(range(raw.numel()), bits))
    for byte, bit in places[:: max(1, len(places) // 150)]:
        raw[byte] ^= 1 << bit
        seen.add(one(w))
        raw[byte] ^= 1 << bit
    assert len(seen) == 1 + len(places[:: max(1, len(places) // 150)])


def test_notices_bits_in_every_block_of_a_large_tensor(one):
    w = torch.randn(200_003)  # several blocks of 65,536 float32, and an odd tail
    seen = {one(w)}
    for at in (0, 65_535, 65_536, 131_071, 150_000, 200_001, 200_002):
        for bit in (0, 12, 31):
            w.view(torch.int32)[at] ^= torch.tensor(1 << bit).to(torch.int32) if bit < 31 else torch.tensor(-(2**31))
            seen.add(one(w))
            w.view(torch.int32)[at] ^= torch.tensor(1 << bit).to(torch.int32) if bit < 31 else torch.tensor(-(2**31))
    assert len(seen) == 22


@pytest.mark.parametrize("dtype", DTYPES[:-1])
def test_notices_swapped_elements(dtype, one):
    """Also values that differ in their sign bit alone, which a plain weighted sum modulo 2**64 can miss."""
    w = make(dtype, 140_000)
    w[5], w[70_003], w[6], w[7], w[8], w[136_000] = 3, -3, 1, 2, 4, -4
    expected = one(w)
    for i, j in ((5, 70_003), (6, 7), (8, 136_000), (5, 8)):
        swapped = w.clone()
        swapped[i], swapped[j] = w[j], w[i]
        assert one(swapped) != expected
    rolled = w.view(torch.uint8).roll(65_536 * 4).view(dtype)  # whole blocks in another order
    assert one(rolled) != expected


def test_notices_words_swapped_that_differ_in_the_top_bit(one):
    w = torch.randint(0, 2**62, (64,))
    expected = one(w)
    for i, j in itertools.combinations(range(0, 64, 7), 2):
        pair = w.clone()
        pair[i] = w[j] ^ torch.tensor(-(2**63))
        other = pair.clone()
        other[i], other[j] = pair[j], pair[i]
        assert len({one(pair), one(other), expected}) == 3


def test_notices_signed_zeros_and_payloads_of_nan(one):
    assert one(torch.tensor([0.0])) != one(torch.tensor([-0.0]))
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).chunk(2)
    assert quiet.isnan().all()
    assert other.isnan().all()
    assert one(quiet) != one(other)
    assert one(quiet) == one(quiet.clone())


def in_plain_numbers(name, tensor):
    """The definition once more: rows of 2,048 bytes times 16 columns of odd numbers, added up with a number each."""

    def splitmix(first, count):
        x = np.arange(first, first + count, dtype=np.uint64)
        x *= np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        return (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)

    columns = (splitmix(1, 2048 * 16) >> np.uint64(58)).astype(np.int64).reshape(2048, 16) * 2 - 63
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    rows = np.frombuffer(data + bytes(-len(data) % 2048), dtype=np.int8).reshape(-1, 2048).astype(np.int64)
    numbers = splitmix(1 + 2048 * 16, len(rows)) | np.uint64(1)
    total = ((rows @ columns).astype(np.uint64) * numbers[:, None]).sum(0)
    header = json.dumps([[name, str(tensor.dtype)[6:], list(tensor.shape)]])
    return blake2b(header.encode() + total.astype("<u8").tobytes(), digest_size=16).hexdigest()


def test_is_what_its_definition_says():
    """Receipts outlive a release, and a sender may be another program: the value itself is part of the contract."""
    for tensor in (torch.randn(3, 5), make(torch.bfloat16, 77), make(torch.int8, 16_385), torch.randn(17_000_000)):
        assert digest_tensors([("model.w", tensor)]) == in_plain_numbers("model.w", tensor)
    w = torch.arange(100_000, dtype=torch.int32).view(100, 1000)
    assert digest_tensors([("w", w), ("b", torch.ones(3))]) == "9254964116e46b336c92315247a939d1"


def test_of_bytes_is_what_its_definition_says():
    """XXH3 with a seed of name, dtype and shape for each tensor, and their sum."""
    tensors, total = {"w": torch.arange(100_000, dtype=torch.int32).view(100, 1000), "b": torch.ones(3)}, 0
    for name, dtype, shape in (("w", "int32", [100, 1000]), ("b", "float32", [3])):
        header = blake2b(json.dumps([name, dtype, shape]).encode(), digest_size=8).digest()
        data = tensors[name].numpy().tobytes()
        total += xxhash.xxh3_128_intdigest(data, seed=int.from_bytes(header, "little"))
    assert digest_tensors(tensors.items(), "bytes") == f"{total % 2**128:032x}" == "2615b47f65fc9cf125bc83096aecb2c4"
    assert xxhash.xxh3_128_hexdigest(b"") == "99aa06d3014798d86001c324468d497f"  # of XXH3's own specification


def test_methods_are_never_equal_and_fit_the_memory():
    for tensors in ({"w": torch.randn(5)}, {"w": torch.zeros(0)}):
        assert digest_tensors(tensors.items(), "rows") != digest_tensors(tensors.items(), "bytes")
    assert method_for(torch.device("cpu")) == "bytes"
    assert method_for(torch.device("cuda", 1)) == method_for(torch.device("xpu")) == "rows"


def test_an_entry_is_read_when_its_tensor_was_copied(method):
    """Entries may come from who copies: none is read before it is there."""
    tensors = [(f"w{size}", make(torch.int8, size)) for size in (3, 5000, 0, 2048, 700)]
    room = torch.full((12 * 2048,), 255, dtype=torch.uint8)
    found = new_digest(method)
    found.add_packed(room[: 8 * 2048], place(tensors, pack(tensors).entries, room))
    assert found.hexdigest() == digest_tensors(tensors, method)


def test_devices_without_a_product_of_bytes_say_the_same():
    for rows in (torch.full((3, row_digest.ROW), -128, dtype=torch.int8), make(torch.int8, 40, row_digest.ROW)):
        numbers = row_digest._numbers(torch.device("cpu"))
        assert torch.equal(row_digest._slow_product(rows, numbers).long(), rows.long() @ numbers.long())
        assert torch.equal(row_digest._product(rows).long(), rows.long() @ numbers.long())
    assert (numbers % 2 != 0).all()


def test_a_processor_multiplies_in_the_way_that_is_faster_on_it():
    """Without instructions for int8, an int8 product takes twelve times as long as the same in float32."""
    rows, numbers = make(torch.int8, 512, row_digest.ROW), row_digest._numbers(torch.device("cpu"))
    products = (torch._int_mm, row_digest._slow_product, lambda rows, _: row_digest._product(rows))
    first, second, chosen = (
        min(timeit.repeat(partial(product, rows, numbers), timer=time.process_time, number=1, repeat=5))
        for product in products
    )
    assert chosen < 3 * min(first, second)


def test_reads_a_parameter_without_touching_its_graph(one):
    w = torch.nn.Parameter(torch.randn(4, 4))
    assert one(w) == one(w.detach().clone())
    assert one((w * 1).T) == one(w.detach().T.clone())


def test_parts_of_a_tensor_are_the_tensor(one, method):
    """As a bucket takes them: cut at rows, and across the limits of what is added up at once."""
    w = make(torch.float32, 2_600_000)
    expected, raw = one(w), w.view(torch.uint8)
    for step in (2048, 3 * 2048, 1 << 20, 8_386_560, len(raw)):
        found = new_digest(method)
        part = found.open("w", w.dtype, tuple(w.shape), w.device)
        for begin in range(0, len(raw), step):
            part.take(raw[begin : begin + step])
        assert found.hexdigest() == expected


@pytest.mark.slow
def test_rows_far_apart_have_numbers_of_their_own():
    """64 MiB have as many rows as there are numbers in a block."""
    w = torch.zeros(2 * row_digest._BLOCK + 1, row_digest.ROW, dtype=torch.int8)
    found = set()
    for row in (0, 1, row_digest._BLOCK - 1, row_digest._BLOCK, 2 * row_digest._BLOCK):
        w[row, 0] = 1
        found.add(digest_tensors([("w", w)]))
        w[row, 0] = 0
    assert len(found) == 5
