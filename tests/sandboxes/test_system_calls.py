"""The seccomp filter, interpreted here, for both processors: the numbers below are from the kernel's tables."""

import errno
import struct

import pytest

from hone.sandboxes.kernel.system_calls import (
    ALLOWED,
    ARCHITECTURES,
    FILE_ATTRIBUTES,
    NEWEST,
    SENDING,
    SIGNALS,
    UnknownMachine,
    seccomp_filter,
)

ALLOW, KILL = "allow", "kill"
X86, ARM = 0xC000003E, 0xC00000B7


def decide(program: bytes, architecture: int, number: int, *arguments: int) -> str:
    """What the kernel would do with a call: a small interpreter of classic BPF."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(*arguments, 0, 0, 0, 0, 0, 0)[:6])
    code = list(struct.iter_unpack("=HBBI", program))
    at = value = 0
    while True:
        kind, yes, no, k = code[at]
        at += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("=I", data, k)
        elif kind == 0x54:
            value &= k
        elif kind == 0x06:
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(k) or errno.errorcode[k & 0xFFFF]
        else:
            held = {0x15: value == k, 0x25: value > k, 0x45: bool(value & k)}[kind]
            at += yes if held else no


def of(machine: str, network=False, signals=True, attributes=False) -> bytes:
    return seccomp_filter(network=network, signals=signals, attributes=attributes, machine=machine)


@pytest.mark.parametrize(
    ("machine", "architecture", "numbers"),
    [
        ("x86_64", X86, {"read": 0, "socket": 41, "ptrace": 101, "unshare": 272, "bpf": 321, "kill": 62, "fchmod": 91}),
        (
            "aarch64",
            ARM,
            {"read": 63, "socket": 198, "ptrace": 117, "unshare": 97, "bpf": 280, "kill": 129, "fchmod": 52},
        ),
    ],
)
def test_what_is_refused_and_what_is_not(machine, architecture, numbers):
    program = of(machine)
    assert decide(program, architecture, numbers["read"]) == ALLOW
    for name in ("socket", "ptrace", "unshare", "bpf", "fchmod"):
        assert decide(program, architecture, numbers[name], 2) == "EPERM", name
    assert decide(program, architecture, 425) == "EPERM"  # io_uring_setup has one number everywhere
    assert decide(program, architecture, 463) == decide(program, architecture, 0x40000000) == "ENOSYS"
    assert decide(program, architecture ^ 1, numbers["read"]) == KILL
    assert decide(program, architecture, numbers["kill"]) == ALLOW
    assert decide(of(machine, signals=False), architecture, numbers["kill"]) == "EPERM"
    assert decide(of(machine, attributes=True), architecture, numbers["fchmod"]) == ALLOW


def test_arguments_decide():
    closed, connected = of("x86_64"), of("x86_64", network=True)
    assert [decide(connected, X86, 41, family) for family in (1, 2, 10, 16)] == ["EPERM", ALLOW, ALLOW, "EPERM"]
    pairs = {(1, 1): ALLOW, (1, 0x80801): ALLOW, (1, 5): ALLOW, (1, 2): "EPERM", (1, 3): "EPERM", (2, 1): "EPERM"}
    assert {kind: decide(closed, X86, 53, *kind) for kind in pairs} == pairs  # socketpair: family, type
    owner = {8: "EPERM", 10: "EPERM", 15: "EPERM", 4: ALLOW, 1030: ALLOW}
    assert {command: decide(closed, X86, 72, 3, command) for command in owner} == owner  # fcntl: F_SETOWN, F_SETSIG
    assert [decide(closed, X86, 16, 3, request) for request in (0x8901, 0x8902)] == ["EPERM"] * 2  # ioctl: FIOSETOWN
    mapped = {0x21: "EPERM", 0x23: "EPERM", 0x8021: "EPERM", 0x22: ALLOW, 0x01: ALLOW, 0x02: ALLOW}
    assert {flags: decide(closed, X86, 9, 0, 1, 3, flags) for flags in mapped} == mapped  # mmap: shared and anonymous
    counted, online = (
        seccomp_filter(network=network, signals=True, attributes=True, fixed=False, machine="x86_64")
        for network in (False, True)
    )
    assert [decide(program, X86, 46) for program in (closed, counted, online)] == [ALLOW, "EPERM", ALLOW]  # sendmsg
    assert (decide(closed, X86, 285), decide(counted, X86, 285)) == (ALLOW, "ENOTSUP")  # fallocate
    assert [decide(closed, X86, 56, flags) for flags in (0x01200011, 0x10000011)] == [ALLOW, "EPERM"]  # clone
    assert decide(closed, X86, 435) == "ENOSYS"  # clone3
    assert [decide(closed, X86, 302, pid) for pid in (0, 77)] == [ALLOW, "EPERM"]  # prlimit64
    assert [decide(closed, X86, 157, option) for option in (4, 15)] == ["EPERM", ALLOW]  # prctl: DUMPABLE, NAME
    assert [decide(closed, X86, 16, 0, request) for request in (0x5401, 0x5412)] == [ALLOW, "EPERM"]  # ioctl: TIOCSTI


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", X86), ("aarch64", ARM)])
def test_what_nobody_named_is_refused(machine, architecture):
    program = of(machine)
    numbers = ARCHITECTURES[machine][1]
    named = {numbers[name] for name in (*ALLOWED, *SENDING, *SIGNALS) if name in numbers}
    special = {numbers[name] for name in ("prctl", "ioctl", "fcntl", "fallocate", "clone", "personality", "clone3")}
    special |= {numbers[name] for name in ("prlimit64", "sched_setaffinity", "mmap")}
    found = {number for number in range(NEWEST + 1) if decide(program, architecture, number) == ALLOW}
    assert found - special == named
    refused = [name for name in numbers if numbers[name] not in named | special and name not in FILE_ATTRIBUTES]
    assert {"ptrace", "mount", "bpf", "userfaultfd", "memfd_create", "io_uring_setup", "setns"} <= set(refused)


def test_another_processor_is_an_error():
    with pytest.raises(UnknownMachine, match="no system call numbers for riscv64"):
        of("riscv64")
