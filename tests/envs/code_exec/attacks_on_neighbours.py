"""Programs that go after the processes around them, the programs next to them, and the watch."""

from __future__ import annotations

from ludic.envs.code_exec.sandbox.base import RunStatus as S
from tests.envs.code_exec.attack import ENDED, STOPPED, Attack

ATTACKS = [
    Attack(
        "descriptors that were left open",
        """
        harm(lambda: [fd for fd in range(3, 1024) if tried(lambda: os.fstat(fd))])
        """,
        ENDED,
    ),
    Attack(
        "memory of the first process",
        """
        for name in ('mem', 'task/1/mem', 'map_files', 'pagemap', 'auxv', 'clear_refs'):
            harm(lambda: open(f'/proc/1/{{name}}', 'rb').read(8))
        harm(lambda: os.listdir('/proc/1/fd'))
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "a descriptor of the first process by pidfd",
        """
        pidfd = os.pidfd_open(1)
        for fd in range(64): harm(lambda: call(438, 438, pidfd, fd, 0))
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "the root of the first process",
        """
        for p in ('/proc/1/root/tmp', '/proc/1/cwd', '/proc/1/task/1/root'):
            harm(lambda: os.listdir(p))
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "entering the namespaces of the first process",
        """
        import glob
        for p in glob.glob('/proc/1/ns/*') + glob.glob('/proc/self/ns/*'):
            harm(lambda: call(308, 268, os.open(p, os.O_RDONLY), 0))
        """,
        ENDED,
    ),
    Attack(
        "the namespace above",
        """
        import fcntl
        for kind in ('user', 'pid'):
            for ask in (0xb701, 0xb702):
                fd = os.open(f'/proc/self/ns/{{kind}}', os.O_RDONLY)
                above = tried(lambda: fcntl.ioctl(fd, ask))
                harm(lambda: above and call(308, 268, above, 0))
        """,
        ENDED,
    ),
    Attack(
        "the limits of the first process",
        """
        import resource as r
        for kind in (r.RLIMIT_CPU, r.RLIMIT_NOFILE, r.RLIMIT_AS, r.RLIMIT_STACK):
            tried(lambda: r.prlimit(1, kind, (0, 0)))
        os._exit(3)
        """,
        frozenset({S.ERROR, S.SIGNAL}),
        isolated=True,
    ),
    Attack(
        "stopping the first process",
        """
        for s in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT):
            for pid in (1, os.getppid()): tried(lambda: os.kill(pid, s))
        """,
        ENDED,
    ),
    Attack(
        "priorities of all the user's processes",
        """
        tried(lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))
        tried(lambda: os.sched_setaffinity(1, {{0}}))
        harm(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(9)) is None)
        """,
        ENDED,
    ),
    Attack(
        "a process whose first thread has ended",
        """
        import threading
        def hog():
            kept = []
            for _ in range(60):
                kept.append(bytearray(os.urandom(1) * (10 << 20)))
                time.sleep(0.05)
            os.write(1, b'HARM')
            os._exit(0)
        threading.Thread(target=hog).start()
        call(60, 93, 0)
        """,
        frozenset({S.MEMORY}),
    ),
    Attack(
        "a name that looks like a zombie's",
        """
        ctypes.CDLL(None).prctl(15, b') Z 1 (x)', 0, 0, 0)
        kept = []
        for _ in range(60):
            kept.append(bytearray(os.urandom(1) * (10 << 20)))
            time.sleep(0.05)
        print('HARM')
        """,
        frozenset({S.MEMORY}),
    ),
    Attack(
        "children that nobody waits for",
        """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            if tried(os.fork) == 0:
                for _ in range(99999): pass
                os._exit(0)
        """,
        STOPPED | {S.PROCESSES},
    ),
    Attack(
        "running away by forking",
        """
        while True:
            if tried(os.fork): os._exit(0)
            time.sleep(0.001)
        """,
        frozenset({S.OK}),
    ),
    Attack(
        "a large pipe full of output",
        """
        import fcntl
        tried(lambda: fcntl.fcntl(1, 1031, 1 << 20))
        os.set_blocking(1, False)
        while tried(lambda: os.write(1, b'x' * 4096)): pass
        os.set_blocking(1, True)
        """,
        frozenset({S.OK, S.OUTPUT}),
    ),
    Attack(
        "writing to its own input",
        """
        fd = tried(lambda: os.open('/proc/self/fd/0', os.O_WRONLY | os.O_NONBLOCK))
        if fd:
            while tried(lambda: os.write(fd, b'D' * 4096)): pass
        """,
        ENDED,
    ),
    Attack(
        "a socket for the next run",
        """
        name = '\\0ludic-left'
        harm(lambda: socket.socket(socket.AF_UNIX).connect(name) is None)
        s = socket.socket(socket.AF_UNIX)
        s.bind(name)
        s.listen()
        if os.fork() == 0:
            os.setsid()
            time.sleep(97)
        """,
        frozenset({S.OK}),
    ),
    Attack(
        "a socket of the run before",
        """
        harm(lambda: socket.socket(socket.AF_UNIX).connect('\\0ludic-left') is None)
        for line in open('/proc/net/unix').read().splitlines()[1:]:
            name = line.split()[-1]
            if name.startswith('@'):
                harm(lambda: socket.socket(socket.AF_UNIX).connect('\\0' + name[1:]) is None)
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "a full disk for the next run",
        """
        for i in range(999):
            if not tried(lambda: open(f'f{{i}}', 'wb').write(bytes(1 << 20))): break
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "settings of the kernel",
        """
        import glob
        for p in glob.glob('/proc/sys/*/*') + ['/proc/sysrq-trigger', '/proc/self/loginuid']:
            if os.path.isfile(p): harm(lambda: os.write(os.open(p, os.O_WRONLY), b'7'))
        harm(lambda: os.listdir('/sys/kernel'))
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "the harness's modules in its frames",
        """
        frame = sys._getframe()
        while frame:
            for name in ('_exit', '_write_to', 'os', 'confine', 'tree', 'json', 'supervise'):
                if name in frame.f_globals and frame.f_back: frame.f_globals[name] = None
            frame = frame.f_back
        raise SystemExit(6)
        """,
        frozenset({S.ERROR, S.SIGNAL}),
    ),
    Attack(
        "a signal handler for every signal",
        """
        for s in range(1, 65): tried(lambda: signal.signal(s, lambda *a: None))
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
        while True: tried(lambda: time.sleep(1))
        """,
        STOPPED,
    ),
    Attack(
        "a thousand descriptors in flight",
        """
        a, b = socket.socketpair()
        a.setblocking(False)
        for _ in range(99):
            if not tried(lambda: socket.send_fds(a, [b'x'], [a.fileno(), b.fileno()] * 50)): break
        """,
        ENDED,
    ),
]
