"""Programs that want to do harm. Each prints HARM where it has succeeded.

`{secret}` is a file of the host, `{host_pid}` the process that runs the tests, `{port}` where it
listens on loopback, `{abstract}` its abstract Unix socket, `{outside}` a path that must not come
to be, and `{token}` a word that names the attack's processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ludic.envs.code_exec.sandbox import RunStatus as S

PRELUDE = """
import ctypes, os, platform, signal, socket, subprocess, sys, time
def tried(work):
    try:
        return work()
    except (OSError, ValueError, PermissionError, subprocess.SubprocessError):
        return None
def harm(work):
    if tried(work):
        print("HARM", flush=True)
def call(x86_64, aarch64, *args):
    libc = ctypes.CDLL(None, use_errno=True)
    number = x86_64 if platform.machine() == "x86_64" else aarch64
    return libc.syscall(number, *[ctypes.c_long(a) if isinstance(a, int) else a for a in args]) >= 0
"""

ENDED = frozenset({S.OK, S.ERROR})
STOPPED = frozenset({S.WALL_TIME, S.CPU_TIME})
FULL = frozenset({S.PROCESSES, S.ERROR, *STOPPED})


@dataclass(frozen=True)
class Attack:
    """A program, and what it may be reported as. `isolated`: only a sandbox that hides the file
    system, the processes and the network promises to withstand it."""

    name: str
    program: str
    reported: frozenset[S]
    isolated: bool = False


ATTACKS = [
    Attack("fork bomb", "while True: os.fork()", FULL),
    Attack("fork bomb that minds no error", "while True: tried(os.fork)", frozenset({S.PROCESSES, *STOPPED})),
    Attack("thread bomb", "import threading\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()", FULL | {S.MEMORY}),
    Attack("memory bomb", "kept = []\nwhile True: kept.append(bytearray(10**6))", frozenset({S.MEMORY})),
    Attack("one huge allocation", "kept = bytearray(1 << 36)", frozenset({S.MEMORY})),
    Attack(
        "memory bomb of many processes",
        "for _ in range(12):\n    if os.fork() == 0: break\nkept = bytearray(b'x') * (48 << 20)\ntime.sleep(99)",
        frozenset({S.MEMORY}),
    ),
    Attack("shared memory", "import mmap\nkept = mmap.mmap(-1, 300 << 20)\nfor i in range(0, 300 << 20, 4096): kept[i] = 1\nprint('HARM')", frozenset({S.MEMORY})),
    Attack("memory in a memfd", "harm(lambda: os.memfd_create('x') or True)", ENDED),
    Attack("System V shared memory", "harm(lambda: call(29, 194, 0, 1 << 20, 0o1600))", ENDED),
    Attack("message queue", "harm(lambda: call(240, 180, b'/ludic', 0o102, 0o600, 0))", ENDED),
    Attack(
        "disk filler",
        "for i in range(999):\n    with open(f'f{{i}}', 'wb') as f: f.write(bytes(4 << 20))\nprint('HARM')",
        frozenset({S.ERROR}),
        isolated=True,
    ),
    Attack("one huge file", "with open('f', 'wb') as f:\n    for _ in range(99): f.write(bytes(1 << 20))\nprint('HARM')", frozenset({S.ERROR, S.SIGNAL})),
    Attack("a hole of a file", "os.truncate(os.open('f', os.O_CREAT | os.O_RDWR), 1 << 40)\nprint('HARM')", frozenset({S.ERROR, S.SIGNAL})),
    Attack("too many files", "for i in range(99999): open(f'f{{i}}', 'w').close()\nprint('HARM')", frozenset({S.ERROR}), isolated=True),
    Attack("endless output", "while True: print('x' * 999)", frozenset({S.OUTPUT})),
    Attack("endless errors", "while True: os.write(2, b'x' * 999)", frozenset({S.OUTPUT})),
    Attack("endless output of a child", "subprocess.run(['yes'])", frozenset({S.OUTPUT})),
    Attack("endless loop", "while True: pass", STOPPED),
    Attack(
        "endless loop that ignores signals",
        "for s in range(1, 65):\n    tried(lambda: signal.signal(s, signal.SIG_IGN))\nwhile True: pass",
        STOPPED,
    ),
    Attack("endless sleep", "while True: time.sleep(99)", frozenset({S.WALL_TIME})),
    Attack("endless loops of many processes", "for _ in range(4): os.fork()\nwhile True: pass", STOPPED),
    Attack("a program that stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", frozenset({S.WALL_TIME})),
    Attack("a pattern that never matches", "import re\nre.match(r'(a+)+$', 'a' * 99 + 'b')", STOPPED),
    Attack(
        "double fork and setsid",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        os.execvp('sleep', ['{token}', '97'])\n    os._exit(0)\nos.wait()",
        frozenset({S.OK}),
    ),
    Attack(
        "a daemon that keeps the output open",
        "if os.fork() == 0:\n    os.setsid()\n    signal.signal(15, signal.SIG_IGN)\n    time.sleep(97)\nprint('over')",
        frozenset({S.OK}),
    ),
    Attack("reading /etc/shadow", "harm(lambda: open('/etc/shadow').read())", ENDED),
    Attack("reading a file of the host", "harm(lambda: open('{secret}').read())", ENDED, isolated=True),
    Attack(
        "looking for the tests",
        "for root, _, files in os.walk('/'):\n    if root.startswith(('/proc', '/usr', '/sys', '/dev', sys.base_prefix)): continue\n"
        "    for f in files:\n        text = tried(lambda: open(os.path.join(root, f), 'rb').read(4096)) or b''\n"
        "        if b'the-expected' + b'-outputs' in text: print('HARM', root, f)",
        ENDED,
        isolated=True,
    ),
    Attack("reading the environment", "print(dict(os.environ), open('/proc/self/environ').read())", ENDED),
    Attack(
        "reading /proc of the parent",
        "for pid in (os.getppid(), 1):\n    for name in ('environ', 'maps', 'fd/0', 'root/etc/shadow', 'cwd/x'):\n"
        "        harm(lambda: open(f'/proc/{{pid}}/{{name}}', 'rb').read(64))",
        ENDED,
    ),
    Attack("reading /proc of the host", "harm(lambda: open('/proc/{host_pid}/environ', 'rb').read(64))", ENDED, isolated=True),
    Attack("writing to the parent's memory", "harm(lambda: open(f'/proc/{{os.getppid()}}/mem', 'r+b'))", ENDED),
    Attack("writing to the parent's descriptors", "for n in range(20): harm(lambda: os.open(f'/proc/{{os.getppid()}}/fd/{{n}}', os.O_WRONLY) > 0)", ENDED),
    Attack("network to loopback", "harm(lambda: socket.create_connection(('127.0.0.1', {port}), 2))", ENDED),
    Attack("network out", "harm(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53)))", ENDED),
    Attack("IPv6", "harm(lambda: socket.socket(socket.AF_INET6))", ENDED),
    Attack("netlink", "harm(lambda: socket.socket(16, socket.SOCK_RAW))", ENDED),
    Attack("raw packets", "harm(lambda: socket.socket(17, socket.SOCK_RAW))", ENDED),
    Attack("an abstract socket of the host", "s = socket.socket(socket.AF_UNIX)\nharm(lambda: s.connect('{abstract}') is None)", ENDED, isolated=True),
    Attack("ptrace", "harm(lambda: call(101, 117, 16, os.getppid(), 0, 0) or call(101, 117, 0, 0, 0, 0))", ENDED),
    Attack("process_vm_readv", "harm(lambda: call(310, 270, os.getppid(), 0, 0, 0, 0, 0))", ENDED),
    Attack("writing to the system", "for p in ('/usr/x', '/etc/x', '/x', '/dev/x', '/bin/sh', '/proc/sys/kernel/hostname'): harm(lambda: open(p, 'w'))", ENDED),
    Attack("writing outside", "harm(lambda: open('{outside}', 'w').write('x'))", ENDED, isolated=True),
    Attack("a symlink out", "os.symlink(os.path.dirname('{outside}'), 'out')\nharm(lambda: open('out/' + os.path.basename('{outside}'), 'w').write('x'))", ENDED, isolated=True),
    Attack("a hard link out", "harm(lambda: os.link('/bin/sh', 'sh') is None)", ENDED),
    Attack("changing the rights of the system", "harm(lambda: os.chmod('/usr', 0o777) is None)\nharm(lambda: os.chmod('/usr/bin/env', 0o777) is None)", ENDED),
    Attack("killing the parent", "for pid in (os.getppid(), 1): tried(lambda: os.kill(pid, 9))\ntime.sleep(0.2)\nprint('still here')", ENDED),
    Attack("killing everything", "tried(lambda: os.kill(-1, 9))\ntime.sleep(0.2)", ENDED),
    Attack("killing the host", "harm(lambda: os.kill({host_pid}, 0) is None)", ENDED),
    Attack("exhausting descriptors", "kept = []\nwhile True: kept.append(os.pipe())", frozenset({S.ERROR})),
    Attack("exhausting descriptors of many processes", "for _ in range(3): os.fork()\nkept = []\nwhile tried(lambda: kept.append(os.pipe()) is None): pass\ntime.sleep(0.5)", ENDED),
    Attack(
        "poisoned modules",
        "import builtins, json\nfor name in list(sys.modules): sys.modules[name] = None\n"
        "builtins.open = builtins.print = builtins.len = builtins.isinstance = lambda *a, **k: 1 / 0\n"
        "os._exit = lambda code: None\nsys.exit = None\nsys.stdout = None\nraise SystemExit(5)",
        frozenset({S.ERROR}),
    ),
    Attack(
        "poisoned exit",
        "import atexit, threading\natexit.register(lambda: os._exit(9))\nthreading._shutdown = lambda: os._exit(9)\nsys.stdout.write('x')\nsys.exit(3)",
        frozenset({S.ERROR}),
    ),
    Attack(
        "the harness's own frames",
        "frame = b'D\\0\\0\\0\\x40\\0\\0\\0\\x3c' + b'{{\"stopped\": null, \"exit_code\": 0, \"stdout\": 0}}'\n"
        "for fd in range(64): tried(lambda: os.write(fd, frame))\nos._exit(7)",
        frozenset({S.ERROR}),
    ),
    Attack("files for the next run", "os.makedirs('a/b')\nos.chmod('a', 0)\nfor p in ('left', '/dev/shm/left', '/tmp/ludic-left-{token}'):\n    tried(lambda: open(p, 'w').write('x'))", ENDED),
    Attack("a module for the next run", "open('json.py', 'w').write('print(\"HARM\")')\nopen('sitecustomize.py', 'w').write('print(\"HARM\")')", ENDED),
    Attack("new namespaces", "for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000): harm(lambda: call(272, 97, flag))", ENDED),
    Attack("clone into a namespace", "harm(lambda: call(56, 220, 0x10000000 | 17, 0, 0, 0, 0))\nharm(lambda: call(435, 435, 0, 0))", ENDED),
    Attack("mounting", "os.mkdir('m')\nharm(lambda: call(165, 40, b'none', b'm', b'tmpfs', 0, 0))\nharm(lambda: call(430, 430, b'tmpfs', 0))", ENDED),
    Attack("chroot", "harm(lambda: os.chroot('.') is None)", ENDED),
    Attack("becoming root", "harm(lambda: os.setuid(0) is None)\nharm(lambda: os.setgid(0) is None)\nharm(lambda: subprocess.run(['su', '-c', 'true'], stdin=-3, capture_output=True).returncode == 0)", ENDED),
    Attack("keys of the kernel", "harm(lambda: call(248, 217, b'user', b'n', b'v', 1, -3))\nharm(lambda: call(250, 219, 0, -3, 1))", ENDED),
    Attack(
        "the kernel's larger doors",
        "for x, a in ((425, 425), (321, 280), (298, 241), (323, 282), (246, 104), (175, 105), (304, 265), (303, 264)): harm(lambda: call(x, a, 0, 0, 0, 0, 0))",
        ENDED,
    ),
    Attack("typing into the terminal", "import fcntl\nfor fd in range(3): harm(lambda: fcntl.ioctl(fd, 0x5412, b'x') is not None)", ENDED),
    Attack("devices", "for p in ('/dev/mem', '/dev/kmsg', '/dev/vda', '/dev/sda', '/proc/kcore', '/dev/fuse'): harm(lambda: open(p, 'rb').read(1))", ENDED),
    Attack(
        "raising the limits",
        "import resource as r\nfor k in (r.RLIMIT_NPROC, r.RLIMIT_AS, r.RLIMIT_FSIZE, r.RLIMIT_CPU, r.RLIMIT_NOFILE):\n    harm(lambda: r.setrlimit(k, (r.RLIM_INFINITY, r.RLIM_INFINITY)) is None)",
        ENDED,
    ),
    Attack("going first", "harm(lambda: os.nice(-5) < 0)\nharm(lambda: os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-900'))", ENDED),
    Attack("a crash", "ctypes.string_at(0)", frozenset({S.SIGNAL})),
    Attack("a deep recursion", "sys.setrecursionlimit(10**9)\ndef f(): return [f()]\nf()", frozenset({S.SIGNAL, S.MEMORY, *STOPPED})),
    Attack("a core file", "os.abort()", frozenset({S.SIGNAL})),
    Attack("zombies", "for _ in range(20):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(0.2)", ENDED),
]  # fmt: skip
