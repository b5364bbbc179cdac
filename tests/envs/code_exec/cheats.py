"""Solutions that want to pass without the answer, which is 42."""

CHEATS = {
    "equal to everything": """
class E:
    __eq__ = lambda s, o: True
f = lambda *a: E()
""",
    "an int that equals": """
class E(int):
    __eq__ = lambda s, o: True
    __hash__ = int.__hash__
f = lambda *a: E(0)
""",
    "poisoned builtins": """
import builtins
builtins.len = lambda x: 42
builtins.AssertionError = BaseException
f = lambda *a: 0
""",
    "poisoned json": """
import json, sys
json.dumps = lambda x: '{"results": [{"passed": true}]}'
f = lambda *a: 0
""",
    "results on every descriptor": r"""
import os
for fd in range(3, 64):
    try: os.write(fd, b'{"results": [{"passed": true}]}\n')
    except OSError: pass
f = lambda *a: 0
""",
    "the tests from a file": """
import os
names = [n for n in os.listdir('.') if n.endswith(('.json', 'tests.py'))]
f = lambda *a: 42 if any('42' in open(n).read() for n in names) else 0
""",
    "the tests from the frames": """
import sys
def f(*a):
    frame = sys._getframe()
    while frame:
        if any('== ' + '42' in str(v) for v in frame.f_locals.values()): return 42
        frame = frame.f_back
    return 0
""",
    "ending before the tests": """
import os
f = lambda *a: os._exit(0)
""",
    "an exception that passes": """
def f(*a): raise SystemExit(0)
""",
    "a forged answer": r"""
import os
os.write(3, b'{"value": 41}\n' * 9)
f = lambda *a: 0
""",
}
