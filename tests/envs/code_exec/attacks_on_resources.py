"""Programs that use more than they may."""

from __future__ import annotations

from ludic.envs.code_exec.sandbox.base import RunStatus as S
from tests.envs.code_exec.attack import ENDED, FULL, STOPPED, Attack

ATTACKS = [
    Attack(
        "fork bomb",
        """
        while True: os.fork()
        """,
        FULL,
    ),
    Attack(
        "fork bomb that minds no error",
        """
        while True: tried(os.fork)
        """,
        frozenset({S.WALL_TIME, S.CPU_TIME, S.PROCESSES}),
    ),
    Attack(
        "thread bomb",
        """
        import threading
        while True: threading.Thread(target=time.sleep, args=(99,)).start()
        """,
        FULL | {S.MEMORY},
    ),
    Attack(
        "memory bomb",
        """
        kept = []
        while True: kept.append(bytearray(10**6))
        """,
        frozenset({S.MEMORY}),
    ),
    Attack(
        "one huge allocation",
        """
        kept = bytearray(1 << 36)
        """,
        frozenset({S.MEMORY}),
    ),
    Attack(
        "memory bomb of many processes",
        """
        for _ in range(12):
            if os.fork() == 0: break
        kept = bytearray(b'x') * (48 << 20)
        time.sleep(99)
        """,
        frozenset({S.MEMORY}),
    ),
    Attack(
        "shared memory",
        """
        import mmap
        kept = mmap.mmap(-1, 300 << 20)
        for i in range(0, 300 << 20, 4096): kept[i] = 1
        time.sleep(9)
        print('HARM')
        """,
        frozenset({S.MEMORY}),
    ),
    Attack(
        "memory in a memfd",
        """
        harm(lambda: os.memfd_create('x') or True)
        """,
        ENDED,
    ),
    Attack(
        "System V shared memory",
        """
        harm(lambda: call(29, 194, 0, 1 << 20, 0o1600))
        """,
        ENDED,
    ),
    Attack(
        "message queue",
        """
        harm(lambda: call(240, 180, b'/ludic', 0o102, 0o600, 0))
        """,
        ENDED,
    ),
    Attack(
        "disk filler",
        """
        for i in range(999):
            with open(f'f{{i}}', 'wb') as f: f.write(bytes(4 << 20))
        print('HARM')
        """,
        frozenset({S.ERROR}),
        isolated=True,
    ),
    Attack(
        "one huge file",
        """
        with open('f', 'wb') as f:
            for _ in range(99): f.write(bytes(1 << 20))
        print('HARM')
        """,
        frozenset({S.ERROR, S.SIGNAL}),
    ),
    Attack(
        "a hole of a file",
        """
        os.truncate(os.open('f', os.O_CREAT | os.O_RDWR), 1 << 40)
        print('HARM')
        """,
        frozenset({S.ERROR, S.SIGNAL}),
    ),
    Attack(
        "too many files",
        """
        for i in range(99999): open(f'f{{i}}', 'w').close()
        print('HARM')
        """,
        frozenset({S.ERROR}),
        isolated=True,
    ),
    Attack(
        "endless output",
        """
        while True: print('x' * 999)
        """,
        frozenset({S.OUTPUT}),
    ),
    Attack(
        "endless errors",
        """
        while True: os.write(2, b'x' * 999)
        """,
        frozenset({S.OUTPUT}),
    ),
    Attack(
        "endless output of a child",
        """
        subprocess.run(['yes'])
        """,
        frozenset({S.OUTPUT}),
    ),
    Attack(
        "endless loop",
        """
        while True: pass
        """,
        STOPPED,
    ),
    Attack(
        "endless loop that ignores signals",
        """
        for s in range(1, 65):
            tried(lambda: signal.signal(s, signal.SIG_IGN))
        while True: pass
        """,
        STOPPED,
    ),
    Attack(
        "endless sleep",
        """
        while True: time.sleep(99)
        """,
        frozenset({S.WALL_TIME}),
    ),
    Attack(
        "endless loops of many processes",
        """
        for _ in range(4): os.fork()
        while True: pass
        """,
        STOPPED,
    ),
    Attack(
        "a program that stops itself",
        """
        os.kill(os.getpid(), signal.SIGSTOP)
        """,
        frozenset({S.WALL_TIME}),
    ),
    Attack(
        "a pattern that never matches",
        """
        import re
        re.match(r'(a+)+$', 'a' * 99 + 'b')
        """,
        STOPPED,
    ),
    Attack(
        "double fork and setsid",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execvp('sleep', ['{token}', '97'])
            os._exit(0)
        os.wait()
        """,
        frozenset({S.OK}),
    ),
    Attack(
        "a daemon that keeps the output open",
        """
        if os.fork() == 0:
            os.setsid()
            signal.signal(15, signal.SIG_IGN)
            time.sleep(97)
        print('over')
        """,
        frozenset({S.OK}),
    ),
    Attack(
        "exhausting descriptors",
        """
        kept = []
        while True: kept.append(os.pipe())
        """,
        frozenset({S.ERROR}),
    ),
    Attack(
        "exhausting descriptors of many processes",
        """
        for _ in range(3): os.fork()
        kept = []
        while tried(lambda: kept.append(os.pipe()) is None): pass
        time.sleep(0.5)
        """,
        ENDED,
    ),
    Attack(
        "raising the limits",
        """
        import resource as r
        for k in (r.RLIMIT_NPROC, r.RLIMIT_AS, r.RLIMIT_FSIZE, r.RLIMIT_CPU, r.RLIMIT_NOFILE):
            harm(lambda: r.setrlimit(k, (r.RLIM_INFINITY, r.RLIM_INFINITY)) is None)
        """,
        ENDED,
    ),
    Attack(
        "going first",
        """
        harm(lambda: os.nice(-5) < 0)
        harm(lambda: os.write(os.open('/proc/self/oom_score_adj', os.O_WRONLY), b'-900'))
        """,
        ENDED,
    ),
    Attack(
        "a crash",
        """
        ctypes.string_at(0)
        """,
        frozenset({S.SIGNAL}),
    ),
    Attack(
        "a deep recursion",
        """
        sys.setrecursionlimit(10**9)
        def f(): return [f()]
        f()
        """,
        frozenset({S.SIGNAL, S.WALL_TIME, S.CPU_TIME, S.MEMORY}),
    ),
    Attack(
        "a core file",
        """
        os.abort()
        """,
        frozenset({S.SIGNAL}),
    ),
    Attack(
        "zombies",
        """
        for _ in range(20):
            if os.fork() == 0: os._exit(0)
        time.sleep(0.2)
        """,
        ENDED,
    ),
]
