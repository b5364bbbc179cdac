"""Programs that look, write or reach outside, or at what watches them."""

from __future__ import annotations

from ludic.envs.code_exec.sandbox.base import RunStatus as S
from tests.envs.code_exec.attack import ENDED, Attack

ATTACKS = [
    Attack(
        "reading /etc/shadow",
        """
        harm(lambda: open('/etc/shadow').read())
        """,
        ENDED,
    ),
    Attack(
        "reading a file of the host",
        """
        harm(lambda: open('{secret}').read())
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "looking for the tests",
        """
        for root, _, files in os.walk('/'):
            if root.startswith(('/proc', '/usr', '/sys', '/dev', sys.base_prefix)): continue
            for f in files:
                text = tried(lambda: open(os.path.join(root, f), 'rb').read(4096)) or b''
                if b'the-expected' + b'-outputs' in text: print('HARM', root, f)
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "reading the environment",
        """
        print(dict(os.environ), open('/proc/self/environ').read())
        """,
        ENDED,
    ),
    Attack(
        "reading /proc of the parent",
        """
        for pid in (os.getppid(), 1):
            for name in ('environ', 'maps', 'fd/0', 'root/etc/shadow', 'cwd/x'):
                harm(lambda: open(f'/proc/{{pid}}/{{name}}', 'rb').read(64))
        """,
        ENDED,
    ),
    Attack(
        "reading /proc of the host",
        """
        harm(lambda: open('/proc/{host_pid}/environ', 'rb').read(64))
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "writing to the parent's memory",
        """
        harm(lambda: open(f'/proc/{{os.getppid()}}/mem', 'r+b'))
        """,
        ENDED,
    ),
    Attack(
        "writing to the parent's descriptors",
        """
        for n in range(20):
            harm(lambda: os.open(f'/proc/{{os.getppid()}}/fd/{{n}}', os.O_WRONLY) > 0)
        """,
        ENDED,
    ),
    Attack(
        "network to loopback",
        """
        harm(lambda: socket.create_connection(('127.0.0.1', {port}), 2))
        """,
        ENDED,
    ),
    Attack(
        "network out",
        """
        udp = tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        harm(lambda: udp and udp.sendto(b'x', ('192.0.2.1', 53)))
        """,
        ENDED,
    ),
    Attack(
        "IPv6",
        """
        harm(lambda: socket.socket(socket.AF_INET6))
        """,
        ENDED,
    ),
    Attack(
        "netlink",
        """
        harm(lambda: socket.socket(16, socket.SOCK_RAW))
        """,
        ENDED,
    ),
    Attack(
        "raw packets",
        """
        harm(lambda: socket.socket(17, socket.SOCK_RAW))
        """,
        ENDED,
    ),
    Attack(
        "an abstract socket of the host",
        """
        s = socket.socket(socket.AF_UNIX)
        harm(lambda: s.connect('{abstract}') is None)
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "ptrace",
        """
        harm(lambda: call(101, 117, 16, os.getppid(), 0, 0) or call(101, 117, 0, 0, 0, 0))
        """,
        ENDED,
    ),
    Attack(
        "process_vm_readv",
        """
        harm(lambda: call(310, 270, os.getppid(), 0, 0, 0, 0, 0))
        """,
        ENDED,
    ),
    Attack(
        "writing to the system",
        """
        for p in ('/usr/x', '/etc/x', '/x', '/dev/x', '/bin/sh', '/proc/sys/kernel/hostname'):
            harm(lambda: open(p, 'w'))
        """,
        ENDED,
    ),
    Attack(
        "writing outside",
        """
        harm(lambda: open('{outside}', 'w').write('x'))
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "a symlink out",
        """
        os.symlink(os.path.dirname('{outside}'), 'out')
        harm(lambda: open('out/' + os.path.basename('{outside}'), 'w').write('x'))
        """,
        ENDED,
        isolated=True,
    ),
    Attack(
        "a hard link out",
        """
        harm(lambda: os.link('/bin/sh', 'sh') is None)
        """,
        ENDED,
    ),
    Attack(
        "changing the rights of the system",
        """
        harm(lambda: os.chmod('/usr', 0o777) is None)
        harm(lambda: os.chmod('/usr/bin/env', 0o777) is None)
        """,
        ENDED,
    ),
    Attack(
        "killing the parent",
        """
        for pid in (os.getppid(), 1): tried(lambda: os.kill(pid, 9))
        time.sleep(0.2)
        print('still here')
        """,
        ENDED,
    ),
    Attack(
        "killing everything",
        """
        tried(lambda: os.kill(-1, 9))
        time.sleep(0.2)
        """,
        ENDED,
    ),
    Attack(
        "killing the host",
        """
        harm(lambda: os.kill({host_pid}, 0) is None)
        """,
        ENDED,
    ),
    Attack(
        "poisoned modules",
        """
        import builtins, json
        for name in list(sys.modules): sys.modules[name] = None
        builtins.open = builtins.print = builtins.len = builtins.isinstance = lambda *a, **k: 1 / 0
        os._exit = lambda code: None
        sys.exit = None
        sys.stdout = None
        raise SystemExit(5)
        """,
        frozenset({S.ERROR}),
    ),
    Attack(
        "poisoned exit",
        """
        import atexit, threading
        atexit.register(lambda: os._exit(9))
        threading._shutdown = lambda: os._exit(9)
        sys.stdout.write('x')
        sys.exit(3)
        """,
        frozenset({S.ERROR}),
    ),
    Attack(
        "the harness's own frames",
        r"""
        frame = b'D\0\0\0\x40\0\0\0\x3c' + b'{{"stopped": null, "exit_code": 0, "stdout": 0}}'
        for fd in range(64): tried(lambda: os.write(fd, frame))
        os._exit(7)
        """,
        frozenset({S.ERROR}),
    ),
    Attack(
        "files for the next run",
        """
        os.makedirs('a/b')
        os.chmod('a', 0)
        for p in ('left', '/dev/shm/left', '/tmp/ludic-left-{token}'):
            tried(lambda: open(p, 'w').write('x'))
        """,
        ENDED,
    ),
    Attack(
        "a module for the next run",
        """
        open('json.py', 'w').write('print("HARM")')
        open('sitecustomize.py', 'w').write('print("HARM")')
        """,
        ENDED,
    ),
    Attack(
        "new namespaces",
        """
        for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000): harm(lambda: call(272, 97, flag))
        """,
        ENDED,
    ),
    Attack(
        "clone into a namespace",
        """
        harm(lambda: call(56, 220, 0x10000000 | 17, 0, 0, 0, 0))
        harm(lambda: call(435, 435, 0, 0))
        """,
        ENDED,
    ),
    Attack(
        "mounting",
        """
        os.mkdir('m')
        harm(lambda: call(165, 40, b'none', b'm', b'tmpfs', 0, 0))
        harm(lambda: call(430, 430, b'tmpfs', 0))
        """,
        ENDED,
    ),
    Attack(
        "chroot",
        """
        harm(lambda: os.chroot('.') is None)
        """,
        ENDED,
    ),
    Attack(
        "becoming root",
        """
        harm(lambda: os.setuid(0) is None)
        harm(lambda: os.setgid(0) is None)
        su = ['su', '-c', 'true']
        harm(lambda: subprocess.run(su, stdin=-3, capture_output=True).returncode == 0)
        """,
        ENDED,
    ),
    Attack(
        "keys of the kernel",
        """
        harm(lambda: call(248, 217, b'user', b'n', b'v', 1, -3))
        harm(lambda: call(250, 219, 0, -3, 1))
        """,
        ENDED,
    ),
    Attack(
        "the kernel's larger doors",
        """
        for x, a in ((425, 425), (321, 280), (298, 241), (323, 282), (246, 104), (175, 105),
            (304, 265), (303, 264)):
            harm(lambda: call(x, a, 0, 0, 0, 0, 0))
        """,
        ENDED,
    ),
    Attack(
        "typing into the terminal",
        """
        import fcntl
        for fd in range(3): harm(lambda: fcntl.ioctl(fd, 0x5412, b'x') is not None)
        """,
        ENDED,
    ),
    Attack(
        "devices",
        """
        for p in ('/dev/mem', '/dev/kmsg', '/dev/vda', '/dev/sda', '/proc/kcore', '/dev/fuse'):
            harm(lambda: open(p, 'rb').read(1))
        """,
        ENDED,
    ),
]
