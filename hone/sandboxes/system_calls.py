"""The system calls that a sandboxed program may not make, as a seccomp filter for x86-64 and aarch64.

Calls newer than `NEWEST` do not exist for the program (ENOSYS), so a later kernel adds nothing that nobody has looked
at. Everything else that is not named here is allowed: Landlock decides about files.

Numbers: the kernel's `unistd_64.h` (x86-64) and `asm-generic/unistd.h` (aarch64). The filter language is classic BPF,
see `Documentation/userspace-api/seccomp_filter.rst` in the kernel.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence

NEWEST = 462  # mseal, Linux 6.10


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _table(text: str) -> Mapping[str, int]:
    return {name: int(number) for name, _, number in (one.partition("=") for one in text.split())}


FORBIDDEN = _names(
    """
    ptrace process_vm_readv process_vm_writev kcmp pidfd_getfd process_madvise process_mrelease add_key request_key
    keyctl mount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr
    statmount listmount unshare setns bpf perf_event_open io_uring_setup io_uring_enter io_uring_register
    userfaultfd init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff acct
    quotactl quotactl_fd nfsservctl settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname
    vhangup syslog lookup_dcookie name_to_handle_at open_by_handle_at fanotify_init inotify_init inotify_init1 iopl
    ioperm modify_ldt uselib ustat sysfs _sysctl create_module get_kernel_syms query_module setpriority ioprio_set
    sched_setscheduler sched_setparam sched_setattr migrate_pages move_pages memfd_create memfd_secret shmget shmat
    shmctl msgget msgsnd msgrcv msgctl semget semop semtimedop semctl mq_open mq_unlink mq_timedsend mq_timedreceive
    lsm_set_self_attr
    """
)
FILE_ATTRIBUTES = _names(
    """
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat setxattr lsetxattr fsetxattr removexattr
    lremovexattr fremovexattr utime utimes futimesat utimensat
    """
)
SIGNALS = _names(
    """
    kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal
    """
)
_X86_64 = _table(
    """
    ptrace=101 process_vm_readv=310 process_vm_writev=311 kcmp=312 pidfd_getfd=438 process_madvise=440
    process_mrelease=448 add_key=248 request_key=249 keyctl=250 mount=165 umount2=166 pivot_root=155 chroot=161
    move_mount=429 open_tree=428 fsopen=430 fsconfig=431 fsmount=432 fspick=433 mount_setattr=442 statmount=457
    listmount=458 unshare=272 setns=308 bpf=321 perf_event_open=298 io_uring_setup=425 io_uring_enter=426
    io_uring_register=427 userfaultfd=323 init_module=175 finit_module=313 delete_module=176 kexec_load=246
    kexec_file_load=320 reboot=169 swapon=167 swapoff=168 acct=163 quotactl=179 quotactl_fd=443 nfsservctl=180
    settimeofday=164 clock_settime=227 clock_adjtime=305 adjtimex=159 sethostname=170 setdomainname=171 vhangup=153
    syslog=103 lookup_dcookie=212 name_to_handle_at=303 open_by_handle_at=304 fanotify_init=300 inotify_init=253
    inotify_init1=294 iopl=172 ioperm=173 modify_ldt=154 uselib=134 ustat=136 sysfs=139 _sysctl=156
    create_module=174 get_kernel_syms=177 query_module=178 setpriority=141 ioprio_set=251 sched_setscheduler=144
    sched_setparam=142 sched_setattr=314 migrate_pages=256 move_pages=279 memfd_create=319 memfd_secret=447
    shmget=29 shmat=30 shmctl=31 msgget=68 msgsnd=69 msgrcv=70 msgctl=71 semget=64 semop=65 semtimedop=220 semctl=66
    mq_open=240 mq_unlink=241 mq_timedsend=242 mq_timedreceive=243 lsm_set_self_attr=460 chmod=90 fchmod=91
    fchmodat=268 fchmodat2=452 chown=92 fchown=93 lchown=94 fchownat=260 setxattr=188 lsetxattr=189 fsetxattr=190
    removexattr=197 lremovexattr=198 fremovexattr=199 utime=132 utimes=235 futimesat=261 utimensat=280 kill=62
    tkill=200 tgkill=234 rt_sigqueueinfo=129 rt_tgsigqueueinfo=297 pidfd_send_signal=424 socket=41 socketpair=53
    clone=56 clone3=435 prctl=157 prlimit64=302 sched_setaffinity=203 personality=135 ioctl=16
    """
)
_AARCH64 = _table(
    """
    ptrace=117 process_vm_readv=270 process_vm_writev=271 kcmp=272 pidfd_getfd=438 process_madvise=440
    process_mrelease=448 add_key=217 request_key=218 keyctl=219 mount=40 umount2=39 pivot_root=41 chroot=51
    move_mount=429 open_tree=428 fsopen=430 fsconfig=431 fsmount=432 fspick=433 mount_setattr=442 statmount=457
    listmount=458 unshare=97 setns=268 bpf=280 perf_event_open=241 io_uring_setup=425 io_uring_enter=426
    io_uring_register=427 userfaultfd=282 init_module=105 finit_module=273 delete_module=106 kexec_load=104
    kexec_file_load=294 reboot=142 swapon=224 swapoff=225 acct=89 quotactl=60 quotactl_fd=443 nfsservctl=42
    settimeofday=170 clock_settime=112 clock_adjtime=266 adjtimex=171 sethostname=161 setdomainname=162 vhangup=58
    syslog=116 lookup_dcookie=18 name_to_handle_at=264 open_by_handle_at=265 fanotify_init=262 inotify_init1=26
    setpriority=140 ioprio_set=30 sched_setscheduler=119 sched_setparam=118 sched_setattr=274 migrate_pages=238
    move_pages=239 memfd_create=279 memfd_secret=447 shmget=194 shmat=196 shmctl=195 msgget=186 msgsnd=189
    msgrcv=188 msgctl=187 semget=190 semop=193 semtimedop=192 semctl=191 mq_open=180 mq_unlink=181 mq_timedsend=182
    mq_timedreceive=183 lsm_set_self_attr=460 fchmod=52 fchmodat=53 fchmodat2=452 fchown=55 fchownat=54 setxattr=5
    lsetxattr=6 fsetxattr=7 removexattr=14 lremovexattr=15 fremovexattr=16 utimensat=88 kill=129 tkill=130
    tgkill=131 rt_sigqueueinfo=138 rt_tgsigqueueinfo=240 pidfd_send_signal=424 socket=198 socketpair=199 clone=220
    clone3=435 prctl=167 prlimit64=261 sched_setaffinity=122 personality=92 ioctl=29
    """
)

ARCHITECTURES: Mapping[str, tuple[int, Mapping[str, int]]] = {  # machine -> (AUDIT_ARCH_*, numbers)
    "x86_64": (0xC000003E, _X86_64),
    "aarch64": (0xC00000B7, _AARCH64),
}

AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
PR_SET_DUMPABLE, PR_SET_PTRACER = 4, 0x59616D61
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # they type into a terminal
NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME
USUAL_PERSONALITIES = (0, 0xFFFFFFFF)  # Linux; and "tell me"

_LOAD, _EQUALS, _GREATER, _HAS_BITS, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value


class UnknownMachine(RuntimeError):
    """There are no system call numbers for this processor."""


def seccomp_filter(*, network: bool, signals: bool, attributes: bool, machine: str = "") -> bytes:
    """The filter as an array of `struct sock_filter`. Raises UnknownMachine.

    `signals`: the program may signal any process that the kernel lets it; `attributes`: it may change modes, owners and
    times of files, because it owns no file outside its folder.
    """
    name = machine or platform.machine()
    if name not in ARCHITECTURES:
        raise UnknownMachine(f"no system call numbers for {name} (there are: {', '.join(ARCHITECTURES)})")
    architecture, numbers = ARCHITECTURES[name]
    refused = [*FORBIDDEN, *(() if signals else SIGNALS), *(() if attributes else FILE_ATTRIBUTES)]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUALS, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # a call of another architecture, which has other numbers
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER, 0, 1, NEWEST),
        _fail(errno.ENOSYS),
    ]
    for one in refused:
        if one in numbers:
            program += [(_EQUALS, 0, 1, numbers[one]), _fail(errno.EPERM)]
    for one, argument, allowed in _only(network):
        program += _block(numbers[one], argument, [*((_EQUALS, value) for value in allowed)], refuse=False)
    program += _block(numbers["clone"], 0, [(_HAS_BITS, NEW_NAMESPACES)], refuse=True)
    program += [
        (_EQUALS, 0, 1, numbers["clone3"]),
        _fail(errno.ENOSYS),
    ]  # its flags are in memory; libc uses clone then
    program += _block(numbers["prctl"], 0, [(_EQUALS, PR_SET_DUMPABLE), (_EQUALS, PR_SET_PTRACER)], refuse=True)
    program += _block(numbers["ioctl"], 1, [(_EQUALS, TIOCSTI), (_EQUALS, TIOCLINUX)], refuse=True)
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *one) for one in program)


def _only(network: bool) -> Iterator[tuple[str, int, Sequence[int]]]:
    """Calls that are allowed with some values of one argument only."""
    yield "socket", 0, (AF_INET, AF_INET6) if network else ()
    yield "socketpair", 0, (AF_UNIX,)
    yield "prlimit64", 0, (0,)  # the process itself
    yield "sched_setaffinity", 0, (0,)
    yield "personality", 0, USUAL_PERSONALITIES


def _block(number: int, argument: int, tests: Sequence[tuple[int, int]], *, refuse: bool) -> list[Instruction]:
    """Look at the low word of an argument of call `number`; `refuse` says what a test that holds means."""
    held, otherwise = (_fail(errno.EPERM), (_RETURN, 0, 0, _ALLOW))
    if not refuse:
        held, otherwise = otherwise, held
    body: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
    for code, value in tests:
        body += [(code, 0, 1, value), held]
    body.append(otherwise)
    return [(_EQUALS, 0, len(body), number), *body]


def _fail(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERROR | number)


__all__ = ["ARCHITECTURES", "NEWEST", "UnknownMachine", "seccomp_filter"]
