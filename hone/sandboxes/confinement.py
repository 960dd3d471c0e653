"""Confinement of a program before it begins: its user, files, system calls and limits.

    prepare (still with hone's rights)     the rules of Landlock, the filter, the user that the program becomes
    enter   (in the forked child)          user -> limits -> no_new_privs -> Landlock -> seccomp

As root each sandbox gets a user of its own. So file modes and the kernel's count of processes separate sandboxes too.
An ordinary user has one identity for everything: there the filter also refuses changes of modes, owners and times,
which Landlock does not control.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hone.sandboxes import bubblewrap
from hone.sandboxes.base import Limits
from hone.sandboxes.kernel import landlock
from hone.sandboxes.kernel.system_calls import ARCHITECTURES, seccomp_filter

DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime"),
    *("/proc/cpuinfo", "/proc/meminfo"),
)
NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/services", "/etc/ssl/certs")
OPEN_FILES = 256
ROOTS_CAPABILITIES = {"CAP_CHOWN": 0, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7}
LEAST_USERS = 10_000

_PDEATHSIG, _KEEPCAPS, _SECCOMP, _NO_NEW_PRIVS, _AMBIENT = 1, 8, 22, 38, 47
_FILTER, _RAISE, _READ_SEARCH = 2, 2, 2  # SECCOMP_MODE_FILTER, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH
_CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


@dataclass(frozen=True, slots=True)
class Confinement:
    """Input of `enter`, prepared with hone's rights."""

    folder: str
    limits: Limits
    user: int  # to become; -1: stay who we are
    reads_hidden: bool  # the interpreter is in a folder that only root may enter
    others: int  # processes and threads that this user has already
    rules: int  # descriptor of Landlock's rules; -1: none
    filter: bytes


def readable(limits: Limits) -> list[str]:
    """Return the paths that every program may read and execute: the system's and this interpreter's."""
    interpreter = {sys.prefix, sys.base_prefix, str(Path(os.path.realpath(sys.executable)).parents[1])}
    return [*SYSTEM, *(NETWORK if limits.network else ()), *sorted(interpreter - {"/usr", "/"})]


def prepare(backend: str, folder: str, limits: Limits, user: int, others: int, *, fixed: bool) -> Confinement:
    """Everything that needs hone's rights. Raises OSError or UnknownMachine. `fixed`: the folder's size cannot grow.

    `machine`: the whole machine is the sandbox, of a service; then there are a user and limits, and no rules.
    """
    alone = user >= 0
    if backend == "machine":
        return Confinement(folder, limits, user, alone and _is_hidden(), others, -1, b"")
    inside = backend == "bubblewrap"
    scoped = inside or alone or landlock.version() >= landlock.WITH_SCOPES
    program = seccomp_filter(network=limits.network, signals=scoped, attributes=alone or inside, fixed=fixed)
    rules = -1
    if not inside:
        devices = (*DEVICES, "/dev/zero") if fixed else DEVICES  # see `mounts.ZEROS`
        rules = landlock.ruleset(readable(limits), [folder], devices, network=limits.network)
    return Confinement(folder, limits, user, alone and not inside and _is_hidden(), others, rules, program)


def _is_hidden() -> bool:
    """Return whether some folder above the interpreter is closed to ordinary users."""
    path = Path(os.path.realpath(sys.executable))
    return any(not one.stat().st_mode & 0o001 for one in path.parents) or not path.stat().st_mode & 0o004


def why_not(backend: str) -> str:
    """Why this back end cannot be used here; empty if nothing is known to be missing."""
    if sys.platform != "linux" or os.uname().machine not in ARCHITECTURES:
        return f"a local sandbox needs Linux on x86-64 or aarch64, found {sys.platform} on {os.uname().machine}"
    root = os.geteuid() == 0
    missing = _why_no_landlock() if backend == "landlock" else _why_no_bubblewrap()
    missing = missing or (_why_not_as_root() if root else "")
    if missing or backend == "landlock":
        return missing
    return bubblewrap.why_no_namespaces(free_user(0) if root else -1)


def _why_no_landlock() -> str:
    found = landlock.version()
    if found == 0:
        return "the kernel has no Landlock, or it is off (it needs Linux 6.2 and lsm=landlock,...)"
    if found < landlock.OLDEST:
        return f"the kernel has version {found} of Landlock, and {landlock.OLDEST} (Linux 6.2) is needed"
    return ""


def _why_no_bubblewrap() -> str:
    if not bubblewrap.installed():
        return "bwrap is not installed (the package is called bubblewrap)"
    if os.geteuid() == 0 and _is_hidden():
        return (
            f"hone runs as root and the sandbox does not, but only root may enter the folder of {sys.executable}; use "
            "an interpreter that everybody may run"
        )
    return ""


def _why_not_as_root() -> str:
    """Why root cannot give each sandbox a user of its own: in some containers root is one user among few."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    held = int(status["CapEff"], 16)
    if missing := [name for name, number in ROOTS_CAPABILITIES.items() if not held >> number & 1]:
        return f"hone runs as root without {', '.join(missing)}, so sandboxes get no users of their own; run as a user"
    count = max((count for _, count in _user_ids()), default=0)
    if count < LEAST_USERS:
        return (
            f"hone runs as root of a user namespace with only {count} user ids, and sandboxes with users of their own "
            f"need {LEAST_USERS}; run hone as an ordinary user"
        )
    return ""


def _user_ids() -> list[tuple[int, int]]:
    """(first, count) of each range of user ids that exist in this user namespace."""
    lines = Path("/proc/self/uid_map").read_text(encoding="utf-8").splitlines()
    return [(int(line.split()[0]), int(line.split()[2])) for line in lines]


def stops(backend: str) -> str:
    """Return the accesses that the back end stops on this machine, in one line."""
    what = "files, network, other processes, kernel interfaces, memory, processes, disk, time"
    if backend == "bubblewrap":
        return f"{what}; by namespaces"
    version = landlock.version()
    scoped = "" if version >= landlock.WITH_SCOPES or os.geteuid() == 0 else "; signals by refusing all of them"
    user = "a user of its own for each sandbox" if os.geteuid() == 0 else "the user who runs hone"
    return f"{what}; by Landlock {version}, seccomp and {user}{scoped}"


def free_user(number: int) -> int:
    """A user id for a sandbox of root's: high in the range that this user namespace has, where nobody else is."""
    first, count = max(_user_ids(), key=lambda one: one[1])
    top = min(first + count, 1 << 31) - 2  # programs print larger ids as negative numbers
    return top - number % max(1, min(1 << 22, count // 2))


def enter(given: Confinement) -> None:
    """Give everything up, for good. Raises OSError; the caller must end the process then."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
    if given.user >= 0:
        _become(given.user, given.reads_hidden)
    elif os.geteuid() != 0:
        _keep_capabilities(0)  # those of the warm parent's user namespace
    _prctl(_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
    _limit(given)
    _prctl(_NO_NEW_PRIVS, 1)
    if given.rules >= 0:
        landlock.restrict(given.rules)
        os.close(given.rules)
        _seccomp(given.filter)


def _become(user: int, reads_hidden: bool) -> None:
    _prctl(_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kept = 1 << _READ_SEARCH if reads_hidden else 0  # Landlock still decides which files these are
    _keep_capabilities(kept)
    if kept:
        _prctl(_AMBIENT, _RAISE, _READ_SEARCH)


def _keep_capabilities(kept: int) -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0)
    if _libc.capset(ctypes.byref(header), ctypes.byref(data)) != 0:
        raise OSError(ctypes.get_errno(), "capset: the capabilities of root cannot be given up")


def _limit(given: Confinement) -> None:
    limits = given.limits
    size = limits.memory_mb << 20
    for kind, most in (
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_FSIZE, limits.disk_mb << 20),
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_NPROC, limits.processes + given.others),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        last = most + 1 if kind == resource.RLIMIT_CPU and hard != most else most  # first SIGXCPU, then SIGKILL
        try:
            resource.setrlimit(kind, (most, last))
        except ValueError:
            if given.filter:
                raise
            # gVisor, in which a service runs this, has some of them only; the attendant looks at all that matter


def _seccomp(program: bytes) -> None:
    given = _Program(len(program) // 8, program)
    _prctl(_SECCOMP, _FILTER, ctypes.addressof(given))


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(one) for one in (*arguments, 0, 0, 0, 0)[:4]]
    if _libc.prctl(ctypes.c_int(option), *padded) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl {option}: {os.strerror(error)}")


__all__ = ["Confinement", "enter", "free_user", "prepare", "readable", "stops", "why_not"]
