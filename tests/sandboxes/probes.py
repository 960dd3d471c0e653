"""Programs that try to get out of a sandbox: `python probes.py BACKEND [LANDLOCK]` prints how each got out, or nothing.

With LANDLOCK the sandbox uses at most this version of it, as on an older kernel.

The standard library only: it also runs as another user, with the system's Python. Each program prints ESCAPED if it got
what it should not get. What a program cannot know itself is looked at from outside (`verdict`).
"""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from hone.sandboxes.base import Limits, Ran
from hone.sandboxes.choice import examine
from hone.sandboxes.local import LocalSandboxes

LIMITS = Limits(memory_mb=256, processes=16, output_kb=64, disk_mb=8, cpu_s=5)
REFUSED = 3  # the exit status where the sandbox does not work
SECRET = "the-secret-of-this-run"
LEFT = "86399.25"  # an argument of `sleep` by which leftover processes are found

START = """
import ctypes, os, signal, socket, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    done = libc.syscall(ctypes.c_long(number), *args)
    if done < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return done
def tried(*attempts):
    for attempt in attempts:
        try:
            print("ESCAPED", attempt())
        except (OSError, ValueError) as error:
            print("refused:", error)
"""

SIMPLE = {  # name -> attempts; each must raise OSError
    "read a file outside": ["open('@secret').read()", "os.open('@secret', os.O_RDONLY)"],
    "write a file outside": ["open('@secret', 'a')", "open('@outside/new', 'w')", "os.mkdir('@outside/folder')"],
    "cut a file outside": ["os.truncate('@secret', 0)", "os.open('@secret', os.O_TRUNC)"],
    "change the mode of a file outside": ["os.chmod('@secret', 0o777)", "os.utime('@secret')"],
    "change the owner of a file outside": ["os.chown('@secret', os.getuid(), os.getgid())"],
    "remove or rename a file outside": ["os.unlink('@secret')", "os.rename('@secret', 'mine')"],
    "list a folder outside": ["os.listdir('@outside')", "os.listdir('/root')", "os.listdir('/home')"],
    "follow a symbolic link out": ["os.symlink('@secret', 'link') or open('link').read()"],
    "link a file into the folder": ["os.link('@secret', 'hard')"],
    "climb out of the folder": ["open('../../../../../../' + '@secret').read()"],
    "read the folders of other sandboxes": ["open('../00000000/other.txt').read()", "os.listdir('../00000000')"],
    "write the system's programs": ["open('/usr/bin/env', 'r+b')", "open('/usr/lib/new', 'w')"],
    "read the users of the machine": ["open('/etc/shadow').read()", "open('/etc/passwd').read()"],
    "connect by TCP": ["socket.create_connection(('127.0.0.1', @tcp), 2)"],
    "send by UDP": ["socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @udp))"],
    "connect to a Unix socket": ["socket.socket(socket.AF_UNIX).connect('@unix')"],
    "connect to an abstract Unix socket": ["socket.socket(socket.AF_UNIX).connect('\\0@abstract')"],
    "send to a Unix socket from a pair": [
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '@datagrams')"
    ],
    "send to an abstract socket from a pair": ["socket.socketpair(socket.AF_UNIX, 3)[0].sendto(b'x', '\\0@abstract')"],
    "have the kernel signal another process": [
        "__import__('fcntl').fcntl(socket.socketpair()[0], 8, @victim)",
        "__import__('fcntl').fcntl(socket.socketpair()[0], 10, signal.SIGKILL)",
        "__import__('fcntl').ioctl(socket.socketpair()[0], 0x8901, (@victim).to_bytes(4, 'little'))",
    ],
    "open a raw or netlink socket": ["socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", "socket.socket(17, 3)"],
    "signal another process": ["os.kill(@victim, 0)", "os.kill(@victim, signal.SIGTERM)"],
    "signal the parents": ["os.kill(os.getppid() if os.getppid() > 2 else @runner, signal.SIGKILL)"],
    "trace another process": ["call(@ptrace, 16, @victim, 0, 0)", "call(@ptrace, 0x4206, @victim, 0, 0)"],
    "read another process's memory": ["call(@process_vm_readv, @victim, 0, 0, 0, 0, 0)"],
    "read /proc of another process": ["open('/proc/@victim/environ').read()", "open('/proc/@victim/maps').read()"],
    "read /proc of the parents": ["open('/proc/@runner/environ').read()", "os.listdir('/proc/@runner/fd')"],
    "slow another process down": ["os.setpriority(os.PRIO_PROCESS, @victim, 19)", "os.sched_setaffinity(@victim, {0})"],
    "limit another process": ["__import__('resource').prlimit(@victim, 7, (1, 1))"],
    "use the kernel's keyring": ["call(@add_key, b'user', b'k', b'v', 1, -3)", "call(@keyctl, 0, -3, 1)"],
    "mount": ["libc.mount(b'none', b'.', b'tmpfs', 0, None) and call(@mount, b'none', b'.', b'tmpfs', 0, None)"],
    "make a user namespace": ["call(@unshare, 0x10000000)", "call(@unshare, 0x20000)", "call(@clone, 0x10000011, 0)"],
    "enter a namespace": ["call(@setns, 0, 0)"],
    "load a BPF program": ["call(@bpf, 0, 0, 0)"],
    "open an io_uring": ["call(@io_uring_setup, 8, ctypes.create_string_buffer(120))"],
    "open performance counters": ["call(@perf_event_open, ctypes.create_string_buffer(120), 0, -1, -1, 0)"],
    "handle page faults": ["call(@userfaultfd, 1)"],
    "open a file by its handle": ["call(@open_by_handle_at, 0, 0, 0)"],
    "use a system call that is too new": ["call(9999)"],
    "become root": ["os.setuid(0)", "os.setgroups([0])"],
    "make a device": ["os.mknod('disk', 0o60600, os.makedev(254, 0))"],
    "raise its own limits": ["__import__('resource').setrlimit(9, (1 << 40, 1 << 40))"],
    "memory that no limit counts": ["os.memfd_create('x')", "call(@shmget, 0, 1 << 20, 0o1600)"],
    "shared memory of the machine": ["open('/dev/shm/hone-probe', 'w')"],
    "watch files of others": ["call(@inotify_init1, 0)"],
}

WHOLE = {  # name -> program
    "secrets in the environment": """
libc.getenv.restype = ctypes.c_char_p
found = [value for value in os.environ.values() if '@token' in value]
print("ESCAPED" if found or libc.getenv(b"HONE_SECRET") else "refused")
""",
    "secrets in inherited memory": """
import gc
here = "@tok" + "en"
print("ESCAPED" if any(isinstance(one, dict) and "HONE_SECRET" in one for one in gc.get_objects()) else "refused")
""",
    "inherited descriptors": """
for number in range(3, 4096):
    try:
        print("ESCAPED", number, os.fstat(number))
    except OSError:
        pass
""",
    "calls of another architecture": """
import mmap
if os.uname().machine == "x86_64":
    memory = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
    memory.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # getpid by int 0x80
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    print("ESCAPED", ctypes.CFUNCTYPE(ctypes.c_int)(address)())
""",
    "fork bomb": """
made = 0
while made < 200:
    try:
        if os.fork() == 0:
            time.sleep(60); os._exit(0)
    except OSError:
        break
    made += 1
print("ESCAPED" if made > 40 else "refused", made, flush=True)
""",
    "fork bomb whose parents end": """
while True:
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        pass
""",
    "memory bomb": """
held = []
for _ in range(16):
    try:
        held.append(b"x" * (32 << 20))
    except MemoryError:
        break
print("ESCAPED" if len(held) > 8 else "refused", len(held))
""",
    "memory bomb of many processes": """
for _ in range(6):
    if os.fork() == 0:
        held = b"x" * (100 << 20)
        time.sleep(60)
time.sleep(4)
print("ESCAPED")
""",
    "one large file": """
with open("large", "wb") as file:
    for _ in range(64):
        file.write(b"x" * (1 << 20))
print("ESCAPED")
""",
    "many files": """
for number in range(64):
    with open(f"file{number}", "wb") as file:
        file.write(b"x" * (1 << 20))
time.sleep(4)
print("ESCAPED")
""",
    "files without a name": """
held = []
for number in range(64):
    held.append(open("gone", "wb"))
    os.unlink("gone")
    held[-1].write(b"x" * (1 << 20)); held[-1].flush()
time.sleep(4)
print("ESCAPED")
""",
    "files at the end of long paths": """
for number in range(20):
    os.mkdir("x" * 250); os.chdir("x" * 250)
for number in range(64):
    with open(f"file{number}", "wb") as file:
        file.write(b"x" * (1 << 20))
time.sleep(4)
print("ESCAPED")
""",
    "files in a folder that nobody may list": """
os.mkdir("closed", 0o300)
for number in range(64):
    with open(f"closed/file{number}", "wb") as file:
        file.write(b"x" * (1 << 20))
time.sleep(4)
print("ESCAPED")
""",
    "files in flight between sockets": """
import array
held = []
for number in range(64):
    one, other = socket.socketpair()
    file = open("gone", "wb")
    os.unlink("gone")
    file.write(b"x" * (1 << 20)); file.flush()
    socket.send_fds(one, [b"."], [file.fileno()])
    file.close()
    held += [one, other]
time.sleep(4)
print("ESCAPED")
""",
    "space that is only reserved": """
for number in range(64):
    with open(f"file{number}", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
time.sleep(4)
print("ESCAPED")
""",
    "files in /dev": """
found = False
for folder in ("/dev", "/dev/shm", "/tmp", "/"):
    try:
        open(folder + "/new", "wb")
        found = True
    except OSError:
        pass
print("ESCAPED" if found else "refused")
""",
    "memory in sockets": """
held = []
for _ in range(8):
    if os.fork() == 0:
        try:
            while True:
                pair = socket.socketpair()
                held += pair
                for one in pair:
                    one.setblocking(False)
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
                    try:
                        while True:
                            one.send(b"x" * 65536)
                    except BlockingIOError:
                        pass
        except OSError:
            time.sleep(60)
time.sleep(6)
print("ESCAPED")
""",
    "memory that one page keeps": """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
size, held = 8 << 20, 0
try:
    zeros = os.open("/dev/zero", os.O_RDWR)
except OSError:
    zeros = None
for flags, descriptor in [(0x21, -1), (0x01, zeros), (0x03, zeros)]:
    if descriptor is None:
        continue
    address = libc.mmap(None, size, 3, flags, descriptor, 0)
    if address != 2 ** 64 - 1:
        ctypes.memset(address, 1, size)
        libc.munmap(ctypes.c_void_p(address + 4096), ctypes.c_size_t(size - 4096))
        held += size
if zeros is not None and os.read(zeros, 3) != bytes(3):
    print("ESCAPED: these are no zeros")
print("ESCAPED" if held else "refused", held)
""",
    "endless output": "while True: print('x' * 1000)",
    "endless loop": "while True: pass",
    "leftover process": "subprocess.Popen(['sleep', '@left'])",
    "leftover process with a session of its own": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp('sleep', ['sleep', '@left'])
    os._exit(0)
time.sleep(0.2)
""",
    "time-out dodged by a double fork": """
if os.fork() == 0:
    os.setsid(); libc.prctl(36, 1, 0, 0, 0); signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.execvp('sleep', ['sleep', '@left'])
    time.sleep(60)
time.sleep(60)
""",
    "output kept open by a daemon": """
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
print("refused", flush=True)
os._exit(0)
""",
}
TIMEOUTS = {"endless loop": 0.5, "time-out dodged by a double fork": 0.7, "fork bomb whose parents end": 0.7}
ENDED_BY = {  # name -> the limits that may have ended the program
    "memory bomb of many processes": {"memory"},
    "many files": {"disk", ""},  # or it ends by the error of a full disk
    "files without a name": {"disk", ""},
    "files at the end of long paths": {"disk", ""},
    "files in a folder that nobody may list": {"disk", ""},
    "files in flight between sockets": {"disk", ""},
    "space that is only reserved": {"disk", ""},
    "memory in sockets": {"memory"},
    "endless output": {"output"},
    "endless loop": {"time"},
    "time-out dodged by a double fork": {"time"},
}
NAMES = [*SIMPLE, *WHOLE]


def program(name: str, world: dict[str, str]) -> str:
    """The source of one probe with this machine's numbers and paths."""
    attempts = SIMPLE.get(name)
    text = f"tried({', '.join(f'lambda: {one}' for one in attempts)})" if attempts else WHOLE[name]
    for key in sorted(world, key=len, reverse=True):
        text = text.replace(f"@{key}", world[key])
    return START + text


def verdict(name: str, ran: Ran, world: dict[str, str]) -> str:
    """Why the program got out, or an empty string."""
    if b"ESCAPED" in ran.stdout:
        return ran.stdout.decode("utf-8", "replace")
    if name in ENDED_BY and ran.limit not in ENDED_BY[name]:
        return f"it was not ended by {ENDED_BY[name]}: {ran}"
    if name in SIMPLE and ran.stdout.count(b"refused:") != len(SIMPLE[name]):
        return f"not every attempt was made: {ran}"
    if left := [pid for pid in running() if world["left"] in command(pid)]:
        return f"processes are left: {left}"
    if Path(world["secret"]).read_text() != SECRET or oct(os.stat(world["secret"]).st_mode)[-3:] != "644":
        return "the file outside has changed"
    return "" if os.path.exists(f"/proc/{world['victim']}/fd") else "the other process is gone"


def running() -> list[str]:
    return [one for one in os.listdir("/proc") if one.isdigit()]


def command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""


def numbers() -> dict[str, str]:
    """System call numbers by name, for this machine."""
    from hone.sandboxes.kernel.system_calls import ARCHITECTURES

    return {name: str(number) for name, number in ARCHITECTURES[os.uname().machine][1].items()}


async def main(backend: str, landlock: int) -> dict[str, str]:
    outside = tempfile.mkdtemp(prefix="hone-outside-")
    os.chmod(outside, 0o755)
    secret = Path(outside, "secret.txt")
    secret.write_text(SECRET)
    secret.chmod(0o644)
    os.environ["HONE_SECRET"] = "token-of-this-run"
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    named, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    named.bind(f"{outside}/socket")
    os.chmod(f"{outside}/socket", 0o777)
    abstract.bind(f"\0hone-probe-{os.getpid()}")
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(f"{outside}/datagrams")
    os.chmod(f"{outside}/datagrams", 0o777)
    named.listen()
    abstract.listen()
    victim = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    world = {
        "outside": outside,
        "secret": str(secret),
        "tcp": str(tcp.getsockname()[1]),
        "udp": str(udp.getsockname()[1]),
        "unix": f"{outside}/socket",
        "datagrams": f"{outside}/datagrams",
        "abstract": f"hone-probe-{os.getpid()}",
        "victim": str(victim.pid),
        "runner": str(os.getpid()),
        "token": "token-of-this-run",
        "left": LEFT,
        **numbers(),
    }
    host = LocalSandboxes(backend, LIMITS, landlock=landlock)
    found = {}
    try:
        other = host.open()
        await other.run(["python", "-c", ""], files={"other.txt": b"of another episode"}, timeout_s=20)
        for name in NAMES:
            sandbox = host.open()
            source = program(name, world).encode()
            ran = await sandbox.run(["python", "main.py"], files={"main.py": source}, timeout_s=TIMEOUTS.get(name, 20))
            found[name] = verdict(name, ran, world)
            await sandbox.close()
    finally:
        await host.close()
        victim.kill()
        victim.wait()
    for one in (tcp, udp, named, abstract, datagrams):
        one.close()
    shutil.rmtree(outside)
    return found


if __name__ == "__main__":
    works, detail = asyncio.run(examine(sys.argv[1]))
    if not works:
        sys.stderr.write(detail)
        sys.exit(REFUSED)
    print(json.dumps(asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))))
