"""Programs that try to pass a test without solving it, to leave their jail, or to prevent a verdict.

All of them run against the test `TEST`, whose answer no program can know, so PASS is a forgery. ``@OUTSIDE@`` stands
for a folder of the host, which contains ``secret``. ``@PORT@`` stands for a listening port on the loopback interface,
``@PID@`` for the process of the judge. The tests of the sandbox and `experiments.sandbox.check` use them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from experiments.sandbox import hostile_families


class Hostile(NamedTuple):
    verdicts: str  # what the test may end with, names of `Verdict` in lower case, separated by spaces
    program: str
    test: str


ANSWER = hostile_families.ANSWER  # stands in no jail
TEST = f"result = f(3)\nassert result == {ANSWER}, result"

# Name and verdicts, then the program, to the next heading.
PROGRAMS = r"""
# Objects that pretend
=== always equal: fail
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
f = lambda x: Equal()
=== a bool for a number: fail
def f(x): return True
=== lies about its class: fail
class Liar:
    __class__ = property(lambda self: int)
    def __eq__(self, other): return True
    def __int__(self): return 7
f = lambda x: Liar()
=== an element that equals everything: fail
class E:
    def __eq__(self, other): return True
f = lambda x: [1, {'a': (E(),)}]
=== reduce that runs at the judge: fail
class R:
    def __reduce__(self): return (eval, ('1/0',))
f = lambda x: R()
=== the function itself: fail
def f(x): return f
=== a generator: fail
def f(x):
    yield 1
=== an endless generator: fail oom timeout
import itertools
f = lambda x: itertools.count()
=== not a number: fail
f = lambda x: float('nan')
=== infinity: fail
f = lambda x: [float('inf'), -float('inf')]
=== del with consequences: crash
class D:
    def __del__(self): import os; os._exit(0)
f = lambda x: D() and 1

# Reaching for the test and the verdict
=== frame walk: fail
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for name, value in list(frame.f_locals.items()) + list(frame.f_globals.items()):
            if isinstance(value, list): value.append('passed')
            if isinstance(value, int) and value == 131181949 * 7 + 2: return value
        frame = frame.f_back
=== garbage collector walk: fail
import gc
def f(x):
    return len([o for o in gc.get_objects() if 'Verdict' in str(type(o)) or 'Test' in str(type(o))])
=== the test's text in memory: fail
def f(x):
    found = []
    for who in ('self', '1', '2', '@PID@'):
        try:
            with open(f'/proc/{who}/maps') as maps:
                for line in maps:
                    if 'heap' in line: found.append(line)
            open(f'/proc/{who}/mem', 'rb').read(1)
        except OSError: pass
    if found: raise RuntimeError('LEAK')
    return 0
=== patched builtins: fail crash protocol
import builtins
builtins.abs = lambda x: 0
builtins.all = builtins.any = builtins.isinstance = lambda *a: True
builtins.AssertionError = type('Quiet', (Exception,), {})
def f(x): return 0
=== patched len and type: fail crash protocol
import builtins
builtins.len = lambda x: 0
builtins.type = int
f = lambda x: 0
=== patched runner: fail crash protocol timeout
import sys
main = sys.modules['__main__']
main.encode = lambda value, depth=0: 'true'
main.answer = lambda scope, message: '["%s","ok",true]' % message[0]
def f(x): return 0
=== assertion of its own: fail
def f(x): raise AssertionError('passed')
=== exit at import: fail
import sys
sys.exit(0)
=== os._exit at import: crash
import os
os._exit(0)
=== exit in the call: fail
import sys
def f(x): sys.exit(0)
=== os._exit in the call: crash
import os
def f(x): os._exit(0)
=== raises BaseException: fail
class B(BaseException): pass
def f(x): raise B('passed')
=== KeyboardInterrupt: fail
def f(x): raise KeyboardInterrupt
=== GeneratorExit and StopIteration: fail
def f(x): raise [GeneratorExit, StopIteration][x % 2]
=== exception whose str exits: fail crash
import os
class E(Exception):
    def __str__(self): os._exit(0)
def f(x): raise E
=== an exception of builtin name: fail
class MemoryErrorX(Exception): pass
MemoryErrorX.__name__ = '__import__'
MemoryErrorX.__module__ = 'builtins'
def f(x): raise MemoryErrorX('os')
=== atexit hook: fail
import atexit, os
atexit.register(os._exit, 0)
def f(x): return 0
=== settrace: fail
import sys
def trace(frame, event, arg):
    frame.f_trace_lines = True
    return trace
sys.settrace(trace)
def f(x): return 0
=== settrace that exits: crash
import sys, os
sys.settrace(lambda *a: os._exit(0))
def f(x): return 0
=== import hook: fail
import sys
class Hook:
    def find_spec(self, name, path=None, target=None): raise SystemExit(0)
sys.meta_path.insert(0, Hook())
sys.path.insert(0, '@OUTSIDE@')
def f(x):
    import statistics
    return 0
=== modules replaced: fail crash protocol
import sys
for name in list(sys.modules): sys.modules[name] = None
def f(x): return 0

# The channel
=== garbage to the channel: protocol
<CHANNEL>
def f(x):
    for fd in channels(): os.write(fd, b'\x00\x00\x00\x04pass')
    return 0
=== replies before the question: protocol
<CHANNEL>
for fd in channels():
    for _ in range(9): os.write(fd, frame('["0123456789abcdef","ok",true]'))
def f(x): return 0
=== a thread that floods the channel: protocol fail timeout crash
<CHANNEL>

import threading
def flood():
    while True:
        for fd in channels(): os.write(fd, frame('["","ok",true]'))
threading.Thread(target=flood, daemon=True).start()
def f(x): return 0
=== forged reply: deep nesting: protocol
<CHANNEL>
<NONCE>
def f(x):
    text = '["%s","ok",' % nonce() + '[' * 100000 + ']' * 100000 + ']'
    for fd in channels(): os.write(fd, frame(text))
    import time; time.sleep(60)
=== forged reply: integers of one hash: protocol
def f(x): return {'a': [k * (2**61 - 1) for k in range(50_000)]}
=== tuples of one hash: protocol
def f(x): return [(k * (2**61 - 1), 1) for k in range(20_000)]
=== frame of 4 GB: protocol
<CHANNEL>
def f(x):
    for fd in channels(): os.write(fd, b'\xff' * 4)
    import time; time.sleep(60)
=== reply a byte at a time: timeout protocol
<CHANNEL>
import time
def f(x):
    for fd in channels():
        os.write(fd, b'\x00\x00\xff\xff')
        while True:
            os.write(fd, b' '); time.sleep(0.01)
=== closed descriptors: protocol crash
import os
def f(x):
    os.closerange(0, 64)
    import time; time.sleep(60)
=== closed descriptors and return: protocol crash
import os
def f(x):
    os.closerange(0, 64)
    return 0
=== deaf: timeout
<CHANNEL>
import time
def f(x):
    while True: time.sleep(1)

# Time
=== endless loop at import: timeout
while True: pass
=== endless loop in the call: timeout
def f(x):
    while True: pass
=== loop that catches everything: timeout
def f(x):
    while True:
        try:
            while True: pass
        except BaseException: pass
=== a power: timeout oom
def f(x): return 9 ** 10 ** 8
=== sleeps and ignores signals: timeout
import signal, time
def f(x):
    for n in range(1, 65):
        try: signal.signal(n, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True: time.sleep(60)
=== a regular expression: timeout
import re
def f(x): return re.match('(a+)+$', 'a' * 60 + 'b')
=== raises its own limits: timeout
import resource
try: resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))
except (ValueError, OSError): pass
def f(x):
    while True: pass
=== product of everything: timeout oom
import itertools
def f(x): return list(itertools.product(range(10), repeat=9))

# Memory and other resources
=== memory bomb: oom timeout
def f(x):
    a = []
    while True: a.append(bytearray(1 << 24))
=== memory bomb at import: oom
a = [0] * 10 ** 10
=== memory bomb that catches: timeout oom crash
def f(x):
    a = []
    while True:
        try: a.append(' ' * (1 << 26))
        except MemoryError: pass
=== fork bomb: fail oom crash timeout
import os
def f(x):
    while True: os.fork()
=== fork bomb that catches: timeout
import os
def f(x):
    while True:
        try: os.fork()
        except OSError: pass
=== thread bomb: fail oom crash timeout
import threading, time
def f(x):
    while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
=== threads left running: fail timeout
import threading
def spin():
    while True: pass
for _ in range(3): threading.Thread(target=spin, daemon=True).start()
def f(x): return 0
=== disk bomb: fail timeout
import os
def f(x):
    for i in range(10**6):
        with open(f'/tmp/{i}', 'wb') as out: out.write(bytes(1 << 22))
=== one big file: fail
def f(x):
    with open('/tmp/a', 'wb') as out:
        while True: out.write(bytes(1 << 20))
=== files in /dev/shm: fail
def f(x):
    with open('/dev/shm/a', 'wb') as out: out.write(b'x')
    raise RuntimeError('LEAK')
=== memory that no limit counts: fail oom timeout
import os
def f(x):
    for i in range(60):
        os.write(os.memfd_create('a'), bytes(1 << 26))
=== stdout flood: timeout
import sys
def f(x):
    while True: sys.stdout.write('x' * (1 << 20))
=== stderr flood by descriptor: timeout
import os
def f(x):
    while True: os.write(2, b'x' * (1 << 20)); os.write(1, b'x' * (1 << 20))
=== overflow of the C stack: crash fail timeout oom
import sys
sys.setrecursionlimit(10 ** 9)
def f(x):
    class A:
        def __getattr__(self, name): return getattr(self, name + 'x')
    return repr(A().b)
=== endless recursion: fail
def f(x): return f(x)
=== segfault: crash
import ctypes
def f(x): return ctypes.string_at(0)
=== abort: crash
import os
def f(x): os.abort()
=== huge result: fail
def f(x): return 'x' * (8 << 20)
=== huge list: fail oom timeout
def f(x): return list(range(2_000_000))
=== huge integer: protocol
def f(x): return 1 << (1 << 22)
=== deep result: fail
def f(x):
    a = []
    for _ in range(100_000): a = [a]
    return a
=== result that holds itself: fail
def f(x):
    a = []
    a.append(a)
    return a
=== names of surrogates: fail
def f(x): return '\ud800' * 10
=== exception of surrogates: fail
def f(x): raise ValueError('\ud800\x00' * 1000)
=== bytes that are no text: fail
def f(x): return bytes(range(256))

# Outside
=== writes outside: fail
def f(x):
    with open('@OUTSIDE@/written', 'w') as out: out.write('x')
=== writes to the working directory: fail
import os
def f(x):
    with open(os.path.join(os.getcwd(), '@OUTSIDE@', 'written2'), 'w') as out: out.write('x')
=== writes home: fail
def f(x):
    with open('/root/written_by_a_program', 'w') as out: out.write('x')
=== writes to the interpreter: fail
import os
def f(x):
    with open(os.__file__, 'a') as out: out.write('#')
    raise RuntimeError('LEAK')
=== os restored, then unlink: fail
import sys
sys.modules.pop('os', None)
import posix, importlib, os
importlib.reload(os)
def f(x):
    posix.unlink('@OUTSIDE@/secret')
=== unlink by ctypes: fail
import ctypes
def f(x): return ctypes.CDLL(None).unlink(b'@OUTSIDE@/secret')
=== chmod by ctypes: fail
import ctypes
def f(x): return ctypes.CDLL(None).chmod(b'@OUTSIDE@/secret', 0)
=== symbolic link: fail
import os
def f(x):
    os.symlink('@OUTSIDE@', '/tmp/link')
    with open('/tmp/link/written3', 'w') as out: out.write('x')
=== up and away: fail
def f(x):
    with open('../' * 20 + '@OUTSIDE@/secret') as file: raise RuntimeError('LEAK' + file.read())
=== chroot and back: fail
import os
def f(x):
    os.mkdir('/tmp/c'); os.chroot('/tmp/c'); os.chdir('../../../..')
    raise RuntimeError('LEAK')
=== reads the secret: fail
def f(x):
    with open('@OUTSIDE@/secret') as file: raise RuntimeError('LEAK' + file.read())
=== reads /etc/shadow: fail
def f(x):
    with open('/etc/shadow') as file: raise RuntimeError('LEAK' + file.read())
=== reads /proc/1/environ: fail
def f(x):
    with open('/proc/1/environ') as file: raise RuntimeError('LEAK' + file.read())
=== secret in the environment: fail
import os
def f(x):
    if any('SECRET' in k or 'secret' in v for k, v in os.environ.items()): raise RuntimeError('LEAK')
    return 0
=== system: fail
import os
def f(x): return os.system('echo x > @OUTSIDE@/written4')
=== subprocess: fail
import subprocess
def f(x):
    subprocess.run(['/bin/sh', '-c', 'echo x > @OUTSIDE@/written5'])
    raise RuntimeError('LEAK')
=== exec: fail crash protocol timeout
import os, sys
def f(x): os.execv(sys.executable, [sys.executable, '-c', 'open("@OUTSIDE@/written6", "w")'])
=== loopback: fail
import socket
def f(x): socket.create_connection(('127.0.0.1', @PORT@), timeout=1).send(b'x')
=== the network by IPv6 and UDP: fail
import socket
def f(x):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.sendto(b'x', ('127.0.0.1', @PORT@)); s.sendto(b'x', ('192.0.2.1', 53)); s.connect(('2001:db8::1', 53))
    raise RuntimeError('LEAK')
=== the network outside: fail
import socket
def f(x):
    socket.create_connection(('192.0.2.1', 80), timeout=1)
    raise RuntimeError('LEAK')
=== vsock: fail
import socket
def f(x):
    s = socket.socket(40, socket.SOCK_STREAM)
    s.connect((2, 5001))
    raise RuntimeError('LEAK')
=== kills everybody: fail crash
import os, signal
def f(x):
    os.kill(-1, signal.SIGKILL)
    return 0
=== kills the judge: fail crash
import os, signal
def f(x):
    for pid in (@PID@, os.getppid()):
        os.kill(pid, signal.SIGKILL)
    return 0
=== kills its parent by ctypes: fail crash protocol
import ctypes, os
def f(x): return ctypes.CDLL(None).kill(os.getppid(), 9)
=== limits of the judge: fail
import resource
def f(x):
    resource.prlimit(@PID@, resource.RLIMIT_CPU, (1, 1))
    raise RuntimeError('LEAK')
=== daemon: fail crash timeout
import os, time
def f(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 64)
            time.sleep(300)
        os._exit(0)
    return 0
=== traces its parent: fail
import ctypes, os
def f(x):
    if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0: raise RuntimeError('LEAK')
=== new namespaces: fail
import ctypes
def f(x): return ctypes.CDLL(None).unshare(0x10020000)
=== mount: fail
import ctypes
def f(x):
    if ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: raise RuntimeError('LEAK')
=== io_uring: fail
import ctypes
def f(x): return ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(120))
=== becomes root: fail
import os
def f(x):
    os.setuid(0)
    raise RuntimeError('LEAK' + open('/etc/shadow').read())
=== kernel keys: fail
import ctypes
def f(x): return ctypes.CDLL(None).syscall(250, 0, -3, 0)

# Programs that are none
=== unparseable: fail
def f(x:
    return
=== prose: fail
Sure! Here is the function you asked for:
=== no such function: fail
def g(x): return x
=== not a function: fail
f = 3
=== wrong number of arguments: fail
def f(): return 0
=== reads its input: fail
f = lambda x: int(input())
=== null: fail
f = lambda x: None
"""

PIECES = {
    "<CHANNEL>": """import os, sys, struct
def channels():
    import stat
    for fd in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode): yield fd
        except OSError: pass
def frame(text): return struct.pack('>I', len(text)) + text.encode()""",
    "<NONCE>": """def nonce():
    return sys._getframe(2).f_locals.get('nonce') or sys._getframe(2).f_locals['message'][0]""",
}

EQUAL = """
class Equal(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = BASE.__hash__
def f(x): return Equal(VALUE)
"""
BASES = {"int": "7", "str": "'seven'", "float": "7.0", "list": "[7]", "dict": "{7: 7}", "tuple": "(7,)"}

FORGED = """
<CHANNEL>
<NONCE>
def f(x):
    for fd in channels(): os.write(fd, frame(REPLY.replace('NONCE', nonce())))
    import time; time.sleep(60)
"""
REPLIES = {
    "a verdict": '["NONCE","pass",true]',
    "an unknown tag": '["NONCE","ok",{"object":"Equal"}]',
    "two tags": '["NONCE","ok",{"t":[],"s":[]}]',
    "an unhashable element": '["NONCE","ok",{"s":[[1]]}]',
    "a long integer": '["NONCE","ok",' + "9" * 5000 + "]",
    "a dict of no pairs": '["NONCE","ok",{"d":[1,2]}]',
    "an exception of no name": '["NONCE","raised",[[1]],"E","m"]',
    "an infinite range": '["NONCE","ok",{"r":[0,99999999999999,1]}]',
    "no JSON": "PASS",
    "a bare word": '"pass"',
}

EVERYTHING: dict[str, Hostile] = {}
for _part in re.split(r"^=== ", re.sub(r"^# [A-Z].*$", "", PROGRAMS, flags=re.M), flags=re.M)[1:]:
    _heading, _, _text = _part.partition("\n")
    _name, _, _verdicts = _heading.rpartition(": ")
    EVERYTHING[_name] = Hostile(_verdicts, _text, TEST)
EVERYTHING |= {
    f"{base} that equals everything": Hostile("fail", EQUAL.replace("BASE", base).replace("VALUE", value), TEST)
    for base, value in BASES.items()
}
EVERYTHING |= {
    f"forged reply: {what}": Hostile("protocol", FORGED.replace("REPLY", repr(reply)), TEST)
    for what, reply in REPLIES.items()
}
EVERYTHING |= {
    "null bytes": Hostile("fail", "def f(x): return 0\n\x00\x00", TEST),
    "surrogates": Hostile("fail", "# \udcff\ndef f(x): return '\udcff'", TEST),
    "one megabyte of comment": Hostile("fail", "#" + "x" * (1 << 20) + "\ndef f(x): return 0", TEST),
    "one megabyte of brackets": Hostile("fail oom crash", "a = " + "[" * (1 << 20), TEST),
    "one megabyte of code": Hostile("fail timeout oom", "a = 1\n" * ((1 << 20) // 6) + "def f(x): return 0", TEST),
    "too long": Hostile("fail", "#" + "x" * (3 << 20), TEST),
    "deep expression": Hostile("fail oom crash", "a = " + "-" * 200_000 + "1", TEST),
    "empty": Hostile("fail", "", TEST),
}
EVERYTHING |= {
    name: Hostile(v, program, test or TEST) for name, (v, program, test) in hostile_families.generated().items()
}


def prepare(name: str, outside: str, port: int, pid: int) -> str:
    """Text of a program with the values of this host."""
    text = EVERYTHING[name].program
    marks = {**PIECES, "@OUTSIDE@": outside, "@PORT@": port, "@PID@": pid}
    for mark, value in marks.items():
        text = text.replace(mark, str(value))
    return text


def fingerprint(folder: str | Path) -> list[tuple]:
    """What a program must not change: names, contents and metadata of the files below ``folder``."""
    found = []
    for path in sorted(Path(folder).rglob("*")):
        status = path.lstat()
        kept = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_size, status.st_mtime_ns)
        values = [(name, os.getxattr(path, name)) for name in os.listxattr(path, follow_symlinks=False)]
        found.append((str(path), *kept, values, path.read_bytes() if path.is_file() else b""))
    return found


def survivors(judge: int) -> list[int]:
    """Processes of jails that descend from the process ``judge``, or whose parents have died."""
    parents, jails = {}, []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat, open(f"/proc/{entry}/cmdline", "rb") as cmdline:
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    parents[int(entry)] = int(parent)
                    if b"\0-s\0-S\0-P\0-c\0" in cmdline.read():
                        jails.append(int(entry))
        except (OSError, ValueError):
            continue  # it ended meanwhile, or is no process

    def ours(pid: int) -> bool:
        while pid not in (0, 1, judge):
            if pid not in parents:
                return False
            pid = parents[pid]
            if pid not in (1, judge) and pid not in jails:
                return False  # somebody else's
        return True

    return [pid for pid in jails if ours(pid)]
