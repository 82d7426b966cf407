"""Attacks that a program may try; each prints `BROKE` if it succeeded."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from atomrl.sandbox import Limits, box, run

BROKE = "BROKE"
SECRET = "s3cr3t-0f-the-trainer"
TOKEN = "atomrl-attack-trace"
QUICK = Limits(cpu_s=1, wall_s=4, memory_mb=256, files_mb=8)
MANY = Limits(cpu_s=1, wall_s=4, memory_mb=256, files_mb=8, processes=16)

PROLOGUE = f"""
import ctypes, errno, os, sys, time
TOKEN, BROKE = {TOKEN!r}, {BROKE!r}
libc = ctypes.CDLL(None, use_errno=True)
def attempt(function, *args):
    try:
        result = function(*args)
    except BaseException as error:
        print("stopped:", type(error).__name__, error)
        return None
    print(BROKE, repr(result)[:300])
def absent(*paths):
    for path in paths:
        if os.path.lexists(path):
            print(BROKE, path)
"""

ATTACKS = {
    "fork bomb": "def bomb():\n    while True: os.fork()\nattempt(bomb)",
    "fork once": "attempt(os.fork)",
    "vfork by subprocess": "import subprocess\nattempt(subprocess.run, [sys.executable, '-c', 'pass'])",
    "two gigabytes": "attempt(lambda: len(bytearray(2 << 30)))",
    "memory bit by bit": "kept = []\ndef fill():\n    while len(kept) < 300: kept.append(bytearray(1 << 20))\nattempt(fill)",
    "memory by mmap": "import mmap\nattempt(lambda: [mmap.mmap(-1, 1 << 27) for _ in range(4)])",
    "memory in a memfd": "attempt(os.memfd_create, 'x')",
    "memory of threads": (
        "import threading\nthreading.stack_size(1 << 26)\n"
        "attempt(lambda: [threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(40)])"
    ),
    "a thousand threads": (
        "import threading\n"
        "attempt(lambda: [threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(1000)])"
    ),
    "network: tcp": "import socket\nattempt(socket.create_connection, ('127.0.0.1', 22), 1)",
    "network: udp": "import socket\nattempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)",
    "network: raw": "import socket\nattempt(socket.socket, socket.AF_INET, socket.SOCK_RAW)",
    "network: netlink": "import socket\nattempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW)",
    "network: a name": "import socket\nattempt(socket.getaddrinfo, 'example.org', 80)",
    "abstract unix socket": "import socket\nattempt(socket.socket, socket.AF_UNIX)",
    "socketpair of the network": "import socket\nattempt(socket.socketpair, socket.AF_INET)",
    "environment": "[print(BROKE, k) for k in os.environ if k not in "
    "('HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'PYTHONHASHSEED', 'PWD', 'LC_CTYPE')]",
    "environment of the parent": "attempt(lambda: open(f'/proc/{os.getppid()}/environ').read())",
    "own environment in proc": "attempt(lambda: open('/proc/self/environ').read())",
    "environment in memory": (
        "environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')\n"
        f"i = 0\nwhile environ[i]:\n    if {SECRET[:6]!r}.encode() in environ[i]: print(BROKE)\n    i += 1"
    ),
    "kill the parent": "os.kill(os.getppid(), 9)\ntime.sleep(0.1)\nos.kill(1, 9)",
    "kill everything": "os.kill(-1, 9)",
    "signal the host's processes": "for pid in range(3, 3000):\n    try:\n        os.kill(pid, 0)\n"
    "        if pid != os.getpid(): print(BROKE, pid)\n    except OSError: pass",
    "proc": "absent('/proc', '/sys', '/run', '/var', '/etc', '/home', '/opt', '/work', '/boot', '/mnt', '/srv')",
    "passwords": "attempt(open, '/etc/shadow')\nattempt(open, '/etc/passwd')",
    "the parent's files": "attempt(os.listdir, {canary!r})\nattempt(open, {canary!r} + '/tests.json')",
    "the parent's directory": "print(BROKE) if os.getcwd() != '/tmp' else None\nabsent({here!r})",
    "installed packages": "import importlib.util\n"
    "[print(BROKE, n) for n in ('atomrl', 'torch', 'numpy', 'pip', 'pytest', 'setuptools') if importlib.util.find_spec(n)]",
    "files of packages": "[print(BROKE, p) for p in sys.path if p.endswith('-packages') and os.path.isdir(p) and os.listdir(p)]",
    "write into the host": "attempt(open, {canary!r} + '/reward.json', 'w')",
    "write into Python": "attempt(open, os.__file__, 'a')\nattempt(open, os.path.dirname(os.__file__) + '/x.py', 'w')\n"
    "attempt(os.unlink, os.__file__)\nattempt(os.chmod, os.__file__, 0o777)\nattempt(os.rename, os.__file__, '/tmp/x')",
    "write outside tmp": "[attempt(open, p + TOKEN, 'w') for p in ('/', '/code/', '/dev/', '/usr/', '/lib/', '/home/', '/var/', '/etc/')]\n"
    "[attempt(os.mkdir, p + TOKEN) for p in ('/', '/code/', '/dev/', '/usr/')]",
    "write into its own source": "attempt(open, '/code/main.py', 'w')\nattempt(os.unlink, '/code/main.py')",
    "write into packages": "[attempt(open, p + '/x.py', 'w') for p in sys.path if p.endswith('-packages')] or print('none')",
    "symlink out of tmp": "os.symlink({canary!r} + '/tests.json', '/tmp/link')\nattempt(open, '/tmp/link')\n"
    "os.symlink('/', '/tmp/root')\nattempt(open, '/tmp/root' + {canary!r} + '/tests.json')",
    "hard link": "attempt(os.link, sys.executable, '/tmp/python')",
    "dots": "attempt(open, '../' * 40 + {canary!r} + '/tests.json')\nattempt(os.chdir, '/tmp/../../..' + {canary!r})",
    "a huge file": "def fill():\n    with open('/tmp/x', 'wb') as f:\n        for _ in range(9): f.write(bytes(1 << 20))\nattempt(fill)",
    "many files that are huge together": "def fill():\n    for i in range(20):\n"
    "        with open(f'/tmp/{{i}}', 'wb') as f: f.write(bytes(1 << 20))\nattempt(fill)",
    "a sparse file": "def sparse():\n    with open('/tmp/x', 'wb') as f: f.truncate(1 << 40)\nattempt(sparse)",
    "a sparse file that is filled": "f = open('/tmp/x', 'wb')\nf.truncate(8 << 20)\ndef fill():\n"
    "    for _ in range(3):\n        with open(f'/tmp/{{_}}', 'wb') as g: g.write(bytes(4 << 20))\nattempt(fill)",
    "fallocate": "f = open('/tmp/x', 'wb')\nattempt(os.posix_fallocate, f.fileno(), 0, 1 << 33)",
    "many files": "for i in range(10 ** 7): open(f'/tmp/{{i}}', 'w').close()",
    "many open files": "attempt(lambda: [open('/dev/null') for _ in range(200)])",
    "pipes full of bytes": "def fill():\n    while True:\n        r, w = os.pipe()\n        os.set_blocking(w, False)\n"
    "        try:\n            while True: os.write(w, bytes(1 << 16))\n        except BlockingIOError: pass\nattempt(fill)",
    "deep directories": "def dig():\n    for _ in range(3000):\n        os.mkdir('d')\n        os.chdir('d')\ndig()",
    "devices": "print(*[(BROKE, n) for n in os.listdir('/dev') if n not in ('null', 'urandom')])\n"
    "attempt(open, '/dev/mem', 'rb')\nattempt(open, '/dev/vda', 'rb')\nattempt(open, '/dev/tty')\nattempt(open, '/dev/kmsg')",
    "make a device": "import stat\nattempt(os.mknod, '/tmp/vda', 0o660 | stat.S_IFBLK, os.makedev(254, 0))",
    "a setuid file": "open('/tmp/s', 'w').close()\nos.chmod('/tmp/s', 0o6777)\nattempt(os.chown, '/tmp/s', 0, 0)",
    "become root": "attempt(os.setuid, 0)\nattempt(os.setresuid, 0, 0, 0)\nattempt(os.setgid, 0)\nattempt(os.setgroups, [0])\n"
    "print(BROKE) if 0 in (os.getuid(), os.geteuid(), os.getgid()) else None",
    "capabilities": "class H(ctypes.Structure): _fields_ = [('v', ctypes.c_uint32), ('p', ctypes.c_int)]\n"
    "data = (ctypes.c_uint32 * 6)()\nprint(libc.capget(ctypes.byref(H(0x20080522, 0)), data), list(data))\n"
    "print(BROKE) if any(data) else None",
    "raise a limit": "import resource\n"
    "attempt(resource.setrlimit, resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)\n"
    "attempt(resource.setrlimit, resource.RLIMIT_NPROC, (1000, 1000))\n"
    "attempt(resource.prlimit, 1, resource.RLIMIT_CPU, (1, 1))",
    "priority": "attempt(os.nice, -5)\nattempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))",
    "debug the parent": "print(BROKE) if libc.ptrace(16, os.getppid(), 0, 0) == 0 else None\n"
    "print(BROKE) if libc.ptrace(0, 0, 0, 0) == 0 else None",
    "the clock": "attempt(time.clock_settime, time.CLOCK_REALTIME, 0)",
    "the name of the machine": "import socket\nattempt(socket.sethostname, 'x')\n"
    "print(BROKE) if os.uname().nodename == {node!r} else None",
    "shared memory of Python": "from multiprocessing import shared_memory\n"
    "attempt(shared_memory.SharedMemory, TOKEN, True, 1 << 20)",
    "type into the terminal": "import fcntl\nattempt(fcntl.ioctl, 0, 0x5412, b'x')\nattempt(os.open, '/dev/tty', os.O_RDWR)",
    "inherited descriptors": "for fd in range(3, 128):\n    try:\n        os.fstat(fd)\n        print(BROKE, fd)\n    except OSError: pass",
    "what it was given as input": "os.lseek(0, 0, 0)\nattempt(os.write, 0, b'x')\nattempt(os.ftruncate, 0, 1 << 30)",
    "a core dump": "import signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "a crash": "ctypes.string_at(0)",
    "deep recursion": "sys.setrecursionlimit(10 ** 9)\nattempt(f := lambda: f())",
    "deep recursion in C": "x = []\nfor _ in range(10 ** 6): x = [x]\nattempt(repr, x)",
    "ignore every signal": "import signal\n[signal.signal(s, signal.SIG_IGN) for s in range(1, 32) if s not in (9, 19)]\n"
    "while True: pass",
    "stop itself": "import signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "sleep": "time.sleep(1000)",
    "endless output": "while True: print('x' * 10 ** 5)",
    "endless errors": "while True: print('x' * 10 ** 5, file=sys.stderr)",
    "close everything and stay": "os.closerange(0, 128)\ntime.sleep(1000)",
    "run setpriv": "attempt(os.execv, '/usr/bin/setpriv', ['setpriv', '--reuid', '0', 'true'])\ntime.sleep(0)",
    "replace itself": "os.execv(sys.executable, [sys.executable, '-c', 'import os; print(len(os.listdir(\"/\")))'])",
}  # fmt: skip

WITH_PROCESSES = {
    "fork bomb": "def bomb():\n    while True:\n        try: os.fork()\n        except OSError: time.sleep(0.01)\nbomb()",
    "a daemon that stays": (
        "import subprocess\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', TOKEN], "
        "start_new_session=True)"
    ),
    "a daemon of a daemon": (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.closerange(0, 9)\n"
        "        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', TOKEN])\n"
        "    os._exit(0)"
    ),
    "a daemon that holds the output": "if os.fork() == 0:\n    time.sleep(60)",
    "zombies": "def swarm():\n    for _ in range(3000):\n        if os.fork() == 0: os._exit(0)\nattempt(swarm)",
    "kill the reaper": "os.kill(-1, 9)",
    "namespaces of its own": "print(BROKE) if libc.unshare(0x10000000) == 0 else None\n"
    "print(BROKE) if libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0 and os.uname().machine == 'x86_64' else None",
    "debug a child": "pid = os.fork()\nif pid == 0: time.sleep(9)\n"
    "print(BROKE) if libc.ptrace(16, pid, 0, 0) == 0 else None",
}  # fmt: skip

CALLS = {
    "acct": 163, "add_key": 248, "bpf": 321, "chroot": 161, "clone3": 435, "clock_settime": 227, "delete_module": 176,
    "fanotify_init": 300, "finit_module": 313, "fsopen": 430, "init_module": 175, "inotify_init1": 294,
    "io_setup": 206, "io_uring_setup": 425, "ioperm": 173, "iopl": 172, "kcmp": 312, "kexec_load": 246, "keyctl": 250,
    "landlock_create_ruleset": 444, "lookup_dcookie": 212, "memfd_create": 319, "memfd_secret": 447, "mknod": 133,
    "mlockall": 151, "modify_ldt": 154, "mount": 165, "mount_setattr": 442, "move_mount": 429, "mq_open": 240,
    "msgget": 68, "name_to_handle_at": 303, "open_by_handle_at": 304, "open_tree": 428, "perf_event_open": 298,
    "personality": 135, "pidfd_getfd": 438, "pidfd_open": 434, "pivot_root": 155, "process_vm_readv": 310,
    "process_vm_writev": 311, "ptrace": 101, "quotactl": 179, "reboot": 169, "remap_file_pages": 216,
    "request_key": 249, "seccomp": 317, "semget": 64, "sethostname": 170, "setns": 308, "settimeofday": 164,
    "shmget": 29, "socket": 41, "splice": 275, "swapon": 167, "sync": 162, "syslog": 103, "umount2": 166,
    "unshare": 272, "userfaultfd": 323, "vhangup": 153, "vmsplice": 278,
}  # fmt: skip
"""Numbers of x86_64 system calls that reach the kernel, another program, or something that outlives the program."""


def source_of(attack: str, canary: str) -> str:
    """The program of an attack."""
    node, here = os.uname().nodename, str(Path(__file__).parents[2])
    return PROLOGUE + attack.replace("{canary!r}", repr(canary)).replace("{here!r}", repr(here)).replace(
        "{node!r}", repr(node)
    ).replace("{{", "{").replace("}}", "}")


def calls_of(numbers: dict[str, int]) -> str:
    """A program that makes system calls with arguments of zero and names those that are there."""
    return PROLOGUE + (
        f"for name, number in {numbers!r}.items():\n    ctypes.set_errno(0)\n    result = libc.syscall(number, 0, 0, 0, 0, 0)\n"
        "    if result >= 0 or ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM): print(BROKE, name, ctypes.get_errno())"
    )


def faults_of(source: str, limits: Limits, canary: Path, sandbox: str = "bubblewrap") -> list[str]:
    """Return what an attack achieved and left behind; empty if the sandbox contained it."""
    before = {path.name: path.read_bytes() for path in canary.iterdir()}
    namespaces, end = [], box.Box.end

    def recorded(self: box.Box) -> None:
        end(self)
        namespaces.append(
            bytes(self.status_output).partition(b'"pid-namespace": ')[2].split(b" ")[0].strip(b",").decode()
        )

    box.Box.end = recorded
    began = time.monotonic()
    try:
        result = run(source, stdin="the input", limits=limits, sandbox=sandbox)
    finally:
        box.Box.end = end
    seconds = time.monotonic() - began
    faults = [line for line in (result.stdout + result.stderr).splitlines() if BROKE in line and "print(" not in line]
    if SECRET in result.stdout + result.stderr:
        faults.append("it saw a secret of the environment")
    if seconds > limits.wall_s + 60:  # to end it takes a while where the machine is busy
        faults.append(f"it took {seconds:.1f} s")
    if len(result.stdout) > limits.output_bytes or len(result.stderr) > limits.output_bytes:
        faults.append("it wrote too much")
    if {path.name: path.read_bytes() for path in canary.iterdir()} != before:
        faults.append("it changed a file")
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "."):
        if os.path.lexists(f"{folder}/{TOKEN}"):
            faults.append(f"it left {folder}/{TOKEN}")
    if sandbox == "none":
        return faults
    if not namespaces or not namespaces[0].isdigit():
        faults.append("its namespace is unknown")
    elif left := _processes_in(namespaces[0]):
        faults.append(f"it left the processes {left}")
    return faults


def _processes_in(namespace: str) -> list[str]:
    """Who is in a process namespace, once it has had time to be cleared."""
    deadline = time.monotonic() + 30
    while True:
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(folder / "ns" / "pid") == f"pid:[{namespace}]":
                    pids.append(folder.name)
            except OSError:
                continue
        if not pids or time.monotonic() > deadline:
            return pids
        time.sleep(0.01)


if __name__ == "__main__":  # by another user than the one who runs the tests
    results = {}
    for attacks, allowed in ((ATTACKS, QUICK), (WITH_PROCESSES, MANY)):
        for name, attack in attacks.items():
            results[name] = faults_of(source_of(attack, sys.argv[1]), allowed, Path(sys.argv[1]))
    results["calls"] = faults_of(calls_of(CALLS), QUICK, Path(sys.argv[1]))
    print(json.dumps(results))
