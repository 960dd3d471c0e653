"""The system calls that a sandboxed program may make, as a seccomp filter for x86-64 and aarch64.

What is not named here is refused (EPERM), and calls newer than `NEWEST` do not exist for the program (ENOSYS), so that
libraries use older ones. Landlock decides about files.

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


ALLOWED = _names(
    """
    accept accept4 access alarm arch_prctl bind brk capget capset chdir clock_getres clock_gettime clock_nanosleep
    close close_range connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait
    epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fchdir
    fdatasync fgetxattr flistxattr flock fork fstat fstatat fstatfs fsync ftruncate futex futex_requeue futex_wait
    futex_waitv futex_wake get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid geteuid getgid
    getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid
    getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr ioprio_get
    landlock_add_rule landlock_create_ruleset landlock_restrict_self lgetxattr link linkat listen listxattr
    llistxattr lseek lstat madvise map_shadow_stack membarrier mincore mkdir mkdirat mknod mknodat mlock mlock2
    mlockall mprotect mremap mseal msync munlock munlockall munmap nanosleep newfstatat open openat openat2
    pause pidfd_open pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll pread64 preadv preadv2 pselect6
    pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg rename renameat
    renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend
    rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam
    sched_getscheduler sched_rr_get_interval sched_yield select sendfile sendto set_robust_list
    set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setitimer setpgid setregid setresgid
    setresuid setreuid setrlimit setsid setsockopt setuid shutdown sigaltstack signalfd signalfd4 splice stat statfs
    statx symlink symlinkat sync_file_range syncfs sysinfo tee time timer_create timer_delete timer_getoverrun
    timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times truncate umask uname unlink
    unlinkat vfork wait4 waitid write writev
    """
)
SENDING = _names(  # among others, of descriptors
    """
    sendmsg sendmmsg
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
    clone=56 clone3=435 prctl=157 prlimit64=302 sched_setaffinity=203 personality=135 ioctl=16 accept=43 accept4=288
    access=21 alarm=37 arch_prctl=158 bind=49 brk=12 capget=125 capset=126 chdir=80 clock_getres=229
    clock_gettime=228 clock_nanosleep=230 close=3 close_range=436 connect=42 copy_file_range=326 creat=85 dup=32
    dup2=33 dup3=292 epoll_create=213 epoll_create1=291 epoll_ctl=233 epoll_pwait=281 epoll_pwait2=441
    epoll_wait=232 eventfd=284 eventfd2=290 execve=59 execveat=322 exit=60 exit_group=231 faccessat=269
    faccessat2=439 fadvise64=221 fchdir=81 fdatasync=75 fgetxattr=193 flistxattr=196 flock=73 fork=57 fstat=5
    fstatfs=138 fsync=74 ftruncate=77 futex=202 futex_requeue=456 futex_wait=455 futex_waitv=449 futex_wake=454
    get_robust_list=274 get_thread_area=211 getcpu=309 getcwd=79 getdents=78 getdents64=217 getegid=108 geteuid=107
    getgid=104 getgroups=115 getitimer=36 getpeername=52 getpgid=121 getpgrp=111 getpid=39 getppid=110
    getpriority=140 getrandom=318 getresgid=120 getresuid=118 getrlimit=97 getrusage=98 getsid=124 getsockname=51
    getsockopt=55 gettid=186 gettimeofday=96 getuid=102 getxattr=191 ioprio_get=252 landlock_add_rule=445
    landlock_create_ruleset=444 landlock_restrict_self=446 lgetxattr=192 link=86 linkat=265 listen=50 listxattr=194
    llistxattr=195 lseek=8 lstat=6 madvise=28 map_shadow_stack=453 membarrier=324 mincore=27 mkdir=83 mkdirat=258
    mknod=133 mknodat=259 mlock=149 mlock2=325 mlockall=151 mmap=9 mprotect=10 mremap=25 mseal=462 msync=26
    munlock=150 munlockall=152 munmap=11 nanosleep=35 newfstatat=262 open=2 openat=257 openat2=437 pause=34
    pidfd_open=434 pipe=22 pipe2=293 pkey_alloc=330 pkey_free=331 pkey_mprotect=329 poll=7 ppoll=271 pread64=17
    preadv=295 preadv2=327 pselect6=270 pwrite64=18 pwritev=296 pwritev2=328 read=0 readahead=187 readlink=89
    readlinkat=267 readv=19 recvfrom=45 recvmmsg=299 recvmsg=47 rename=82 renameat=264 renameat2=316
    restart_syscall=219 rmdir=84 rseq=334 rt_sigaction=13 rt_sigpending=127 rt_sigprocmask=14 rt_sigreturn=15
    rt_sigsuspend=130 rt_sigtimedwait=128 sched_get_priority_max=146 sched_get_priority_min=147
    sched_getaffinity=204 sched_getattr=315 sched_getparam=143 sched_getscheduler=145 sched_rr_get_interval=148
    sched_yield=24 select=23 sendfile=40 sendmmsg=307 sendmsg=46 sendto=44 set_robust_list=273 set_thread_area=205
    set_tid_address=218 setfsgid=123 setfsuid=122 setgid=106 setgroups=116 setitimer=38 setpgid=109 setregid=114
    setresgid=119 setresuid=117 setreuid=113 setrlimit=160 setsid=112 setsockopt=54 setuid=105 shutdown=48
    sigaltstack=131 signalfd=282 signalfd4=289 splice=275 stat=4 statfs=137 statx=332 symlink=88 symlinkat=266
    sync_file_range=277 syncfs=306 sysinfo=99 tee=276 time=201 timer_create=222 timer_delete=226
    timer_getoverrun=225 timer_gettime=224 timer_settime=223 timerfd_create=283 timerfd_gettime=287
    timerfd_settime=286 times=100 truncate=76 umask=95 uname=63 unlink=87 unlinkat=263 vfork=58 wait4=61 waitid=247
    write=1 writev=20 fcntl=72 fallocate=285
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
    clone3=435 prctl=167 prlimit64=261 sched_setaffinity=122 personality=92 ioctl=29 accept=202 accept4=242 bind=200
    brk=214 capget=90 capset=91 chdir=49 clock_getres=114 clock_gettime=113 clock_nanosleep=115 close=57
    close_range=436 connect=203 copy_file_range=285 dup=23 dup3=24 epoll_create1=20 epoll_ctl=21 epoll_pwait=22
    epoll_pwait2=441 eventfd2=19 execve=221 execveat=281 exit=93 exit_group=94 faccessat=48 faccessat2=439
    fadvise64=223 fchdir=50 fdatasync=83 fgetxattr=10 flistxattr=13 flock=32 fstat=80 fstatat=79 fstatfs=44 fsync=82
    ftruncate=46 futex=98 futex_requeue=456 futex_wait=455 futex_waitv=449 futex_wake=454 get_robust_list=100
    getcpu=168 getcwd=17 getdents64=61 getegid=177 geteuid=175 getgid=176 getgroups=158 getitimer=102
    getpeername=205 getpgid=155 getpid=172 getppid=173 getpriority=141 getrandom=278 getresgid=150 getresuid=148
    getrlimit=163 getrusage=165 getsid=156 getsockname=204 getsockopt=209 gettid=178 gettimeofday=169 getuid=174
    getxattr=8 ioprio_get=31 landlock_add_rule=445 landlock_create_ruleset=444 landlock_restrict_self=446
    lgetxattr=9 linkat=37 listen=201 listxattr=11 llistxattr=12 lseek=62 madvise=233 map_shadow_stack=453
    membarrier=283 mincore=232 mkdirat=34 mknodat=33 mlock=228 mlock2=284 mlockall=230 mmap=222 mprotect=226
    mremap=216 mseal=462 msync=227 munlock=229 munlockall=231 munmap=215 nanosleep=101 openat=56 openat2=437
    pidfd_open=434 pipe2=59 pkey_alloc=289 pkey_free=290 pkey_mprotect=288 ppoll=73 pread64=67 preadv=69 preadv2=286
    pselect6=72 pwrite64=68 pwritev=70 pwritev2=287 read=63 readahead=213 readlinkat=78 readv=65 recvfrom=207
    recvmmsg=243 recvmsg=212 renameat=38 renameat2=276 restart_syscall=128 rseq=293 rt_sigaction=134
    rt_sigpending=136 rt_sigprocmask=135 rt_sigreturn=139 rt_sigsuspend=133 rt_sigtimedwait=137
    sched_get_priority_max=125 sched_get_priority_min=126 sched_getaffinity=123 sched_getattr=275 sched_getparam=121
    sched_getscheduler=120 sched_rr_get_interval=127 sched_yield=124 sendfile=71 sendmmsg=269 sendmsg=211 sendto=206
    set_robust_list=99 set_tid_address=96 setfsgid=152 setfsuid=151 setgid=144 setgroups=159 setitimer=103
    setpgid=154 setregid=143 setresgid=149 setresuid=147 setreuid=145 setrlimit=164 setsid=157 setsockopt=208
    setuid=146 shutdown=210 sigaltstack=132 signalfd4=74 splice=76 statfs=43 statx=291 symlinkat=36
    sync_file_range=84 syncfs=267 sysinfo=179 tee=77 timer_create=107 timer_delete=111 timer_getoverrun=109
    timer_gettime=108 timer_settime=110 timerfd_create=85 timerfd_gettime=87 timerfd_settime=86 times=153
    truncate=45 umask=166 uname=160 unlinkat=35 wait4=260 waitid=95 write=64 writev=66 fcntl=25 fallocate=47
    """
)

ARCHITECTURES: Mapping[str, tuple[int, Mapping[str, int]]] = {  # machine -> (AUDIT_ARCH_*, numbers)
    "x86_64": (0xC000003E, _X86_64),
    "aarch64": (0xC00000B7, _AARCH64),
}

AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
STREAM, SEQPACKET = 1, 5  # pairs of these are connected; one of datagrams can still send to any address
SOCKET_FLAGS = 0x80800  # SOCK_CLOEXEC, SOCK_NONBLOCK
F_SETOWN, F_SETSIG, F_SETOWN_EX = 8, 10, 15
SHARED_AND_ANONYMOUS = 0x21  # MAP_SHARED, MAP_ANONYMOUS
FIOSETOWN, SIOCSPGRP = 0x8901, 0x8902  # as F_SETOWN: the kernel then sends signals for this process
PR_SET_DUMPABLE, PR_SET_PTRACER = 4, 0x59616D61
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # they type into a terminal
NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWTIME
USUAL_PERSONALITIES = (0, 0xFFFFFFFF)  # Linux; and "tell me"

_LOAD, _AND, _EQUALS, _GREATER, _HAS_BITS, _RETURN = 0x20, 0x54, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, value


class UnknownMachine(RuntimeError):
    """There are no system call numbers for this processor."""


def seccomp_filter(*, network: bool, signals: bool, attributes: bool, fixed: bool = True, machine: str = "") -> bytes:
    """The filter as an array of `struct sock_filter`. Raises UnknownMachine.

    `signals`: the program may signal any process that the kernel lets it; `attributes`: it may change modes, owners and
    times of files, because it owns no file outside its folder; `fixed`: the kernel bounds its folder. Where sizes are
    counted it may not reserve space, which takes no time and is seen too late, and without `network` it may not send
    descriptors, because files in flight are counted nowhere.
    """
    name = machine or platform.machine()
    if name not in ARCHITECTURES:
        raise UnknownMachine(f"no system call numbers for {name} (there are: {', '.join(ARCHITECTURES)})")
    architecture, numbers = ARCHITECTURES[name]
    allowed_calls = [*ALLOWED, *(SIGNALS if signals else ()), *(FILE_ATTRIBUTES if attributes else ())]
    allowed_calls += SENDING if fixed or network else ()
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUALS, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # a call of another architecture, which has other numbers
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER, 0, 1, NEWEST),
        _fail(errno.ENOSYS),
    ]
    for one, argument, allowed in _only(network):
        program += _block(numbers[one], argument, [*((_EQUALS, value) for value in allowed)], refuse=False)
    program += _pairs(numbers["socketpair"])
    program += _block(numbers["clone"], 0, [(_HAS_BITS, NEW_NAMESPACES)], refuse=True)
    program += [
        (_EQUALS, 0, 1, numbers["clone3"]),
        _fail(errno.ENOSYS),
    ]  # its flags are in memory; libc uses clone then
    program += _block(numbers["prctl"], 0, [(_EQUALS, PR_SET_DUMPABLE), (_EQUALS, PR_SET_PTRACER)], refuse=True)
    program += _block(
        numbers["ioctl"], 1, [(_EQUALS, one) for one in (TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP)], refuse=True
    )
    program += _mappings(numbers["mmap"])
    program += _block(numbers["fcntl"], 1, [(_EQUALS, one) for one in (F_SETOWN, F_SETSIG, F_SETOWN_EX)], refuse=True)
    program += [
        (_EQUALS, 0, 1, numbers["fallocate"]),
        (_RETURN, 0, 0, _ALLOW) if fixed else _fail(errno.EOPNOTSUPP),
    ]
    for one in allowed_calls:
        if one in numbers:
            program += [(_EQUALS, 0, 1, numbers[one]), (_RETURN, 0, 0, _ALLOW)]
    program.append(_fail(errno.EPERM))
    return b"".join(struct.pack("=HBBI", *one) for one in program)


def _only(network: bool) -> Iterator[tuple[str, int, Sequence[int]]]:
    """Calls that are allowed with some values of one argument only."""
    yield "socket", 0, (AF_INET, AF_INET6) if network else ()
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


def _pairs(number: int) -> list[Instruction]:
    """Allow socketpair (call `number`) for Unix sockets that stay connected to each other."""
    body: list[Instruction] = [
        (_LOAD, 0, 0, _ARGUMENTS),
        (_EQUALS, 1, 0, AF_UNIX),
        _fail(errno.EPERM),
        (_LOAD, 0, 0, _ARGUMENTS + 8),
        (_AND, 0, 0, 0xFFFFFFFF & ~SOCKET_FLAGS),
        (_EQUALS, 1, 0, STREAM),
        (_EQUALS, 0, 1, SEQPACKET),
        (_RETURN, 0, 0, _ALLOW),
        _fail(errno.EPERM),
    ]
    return [(_EQUALS, 0, len(body), number), *body]


def _mappings(number: int) -> list[Instruction]:
    """Allow mmap (call `number`), except for shared memory without a file.

    Of that a page that stays mapped keeps the whole, whose size is in no figure of the process.
    """
    body: list[Instruction] = [
        (_LOAD, 0, 0, _ARGUMENTS + 8 * 3),
        (_AND, 0, 0, SHARED_AND_ANONYMOUS),
        (_EQUALS, 0, 1, SHARED_AND_ANONYMOUS),
        _fail(errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return [(_EQUALS, 0, len(body), number), *body]


def _fail(number: int) -> Instruction:
    return (_RETURN, 0, 0, _ERROR | number)


__all__ = ["ARCHITECTURES", "NEWEST", "UnknownMachine", "seccomp_filter"]
