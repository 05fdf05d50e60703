"""Families of hostile programs, generated: one program for each call, value, class or exception of a list.

`hostile_programs` describes the marks in the programs. A program that reaches what it must not reach raises LEAK.
"""

from __future__ import annotations

ANSWER = 918_273_645  # the same number as in `hostile_programs.TEST`

# Refused calls: name, number on x86-64, arguments. They have arguments with which the kernel would grant most of them.
SECRET, FOLDER = "b'@OUTSIDE@/secret'", "b'@OUTSIDE@'"
CALLS = {
    "setxattrat": f"463, -100, {SECRET}, 0, b'user.evil', (ctypes.c_uint64 * 2)(id(b'x') + 32, 1), 16",
    "setxattr": f"188, {SECRET}, b'user.evil', b'x', 1, 0",
    "removexattr": f"197, {SECRET}, b'user.evil'",
    "file_setattr": f"469, -100, {SECRET}, (ctypes.c_uint64 * 3)(0x40, 0, 0), 24, 0",
    "file_getattr": f"468, -100, {SECRET}, (ctypes.c_uint64 * 3)(), 24, 0",
    "utimensat": f"280, -100, {SECRET}, None, 0",
    "utime": f"132, {SECRET}, None",
    "chmod": f"90, {SECRET}, 0",
    "fchmodat2": f"452, -100, {SECRET}, 0, 0",
    "chown": f"92, {SECRET}, 1, 1",
    "truncate": f"76, {SECRET}, 0",
    "unlink": f"87, {SECRET}",
    "rename": f"82, {SECRET}, b'@OUTSIDE@/moved'",
    "mkdir": "83, b'@OUTSIDE@/made', 0o777",
    "mknod": "133, b'@OUTSIDE@/made', 0o10644, 0",
    "symlink": "88, b'/', b'@OUTSIDE@/made'",
    "inotify_add_watch": f"254, ctypes.CDLL(None).syscall(294, 0), {FOLDER}, 0xFFF",
    "fanotify_init": "300, 0, 0",
    "timer_create": "222, 1, None, ctypes.create_string_buffer(8)",
    "timerfd_create": "283, 1, 0",
    "signalfd4": "289, -1, ctypes.create_string_buffer(8), 8, 0",
    "eventfd2": "290, 0, 0",
    "epoll_create1": "291, 0",
    "memfd_create": "319, b'a', 0",
    "memfd_secret": "447, 0",
    "userfaultfd": "323, 1",
    "shmget": "29, 0, 4096, 0o1600",
    "mq_open": "240, b'a', 0o102, 0o600, None",
    "semget": "64, 0, 1, 0o1600",
    "pidfd_open": "434, @PID@, 0",
    "process_vm_readv": "310, @PID@, None, 0, None, 0, 0",
    "kcmp": "312, @PID@, @PID@, 1, 0, 0",
    "prlimit64 of the judge": "302, @PID@, 0, None, ctypes.create_string_buffer(16)",
    "sched_setaffinity": "203, 0, 8, (ctypes.c_uint64 * 1)(1)",
    "sched_yield": "24",
    "setpriority": "141, 0, 0, 19",
    "personality": "135, 0x0040000",
    "keyctl": "250, 0, -3, 0",
    "sync": "162",
    "chroot": f"161, {FOLDER}",
    "unshare": "272, 0x10000000",
    "mount_setattr": "442, -100, b'/', 0, (ctypes.c_uint64 * 4)(1), 32",
    "open_tree": "428, -100, b'/', 1",
    "fsopen": "430, b'tmpfs', 0",
    "name_to_handle_at": f"303, -100, {SECRET}, (ctypes.c_uint32 * 40)(128), (ctypes.c_int * 1)(), 0",
    "landlock_create_ruleset": "444, (ctypes.c_uint64 * 1)(1), 8, 0",
    "seccomp": "317, 0, 0, None",
    "clone of a process": "56, 17, 0, 0, 0, 0",
    "clone3": "435, (ctypes.c_uint64 * 8)(0, 0, 0, 0, 17), 64",
    "vfork": "58",
    "socketpair": "53, 1, 1, 0, (ctypes.c_int * 2)()",
    "mlock2": "325, id(ctypes), 4096, 0",
    "cachestat": "451, 0, (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)(), 0",
    "futex_waitv": "449, None, 0, 0, None, 0",
    "lsm_list_modules": "461, (ctypes.c_uint64 * 9)(), (ctypes.c_uint32 * 1)(72), 0",
    "prctl PR_SET_PDEATHSIG": "157, 1, 0, 0, 0, 0",
    "prctl PR_SET_TIMERSLACK": "157, 29, 10**9, 0, 0, 0",
    "prctl PR_SET_DUMPABLE": "157, 4, 1, 0, 0, 0",
    "prctl PR_SET_MM": "157, 35, 8, 0, 0, 0",
    "fcntl F_SETPIPE_SZ": "72, os.pipe()[0], 1031, 1 << 20",
    "fcntl F_NOTIFY": "72, os.open('/', 0), 1026, 0x8000003F",
    "fcntl F_SETLK": "72, os.open(os.__file__, 0), 6, (ctypes.c_uint64 * 4)(0)",
    "fcntl F_SETLEASE": "72, os.open(os.__file__, 0), 1024, 0",
    "flock": "73, os.open(os.__file__, 0), 6",
    "ioctl FS_IOC_SETFLAGS": "16, os.open(os.__file__, 0), 0x40086602, (ctypes.c_uint64 * 1)(0x40)",
    "ioctl FS_IOC_FSSETXATTR": "16, os.open(os.__file__, 0), 0x401C5820, ctypes.create_string_buffer(28)",
    "x32 call": "0x40000027",
    "uretprobe": "335",
    "uprobe": "336",
}
CALL = """
import ctypes, os
def f(x):
    if ctypes.CDLL(None).syscall(@CALL@) >= 0: raise RuntimeError('LEAK')
    return 0
"""

# Values that take the judge long to decode, or much memory: the JSON of a reply, as an expression.
REPLIES = {
    "ranges of one hash": (
        "protocol timeout",
        """'{"s":[' + ','.join('{"r":[%d,%d,1]}' % (k * M, k * M + 1)"""
        """ for k in range(39000)) + ']}'""",
    ),
    "many empty lists": ("protocol", "'[' + ','.join(['[]'] * 1_300_000) + ']'"),
    "many empty sets": ("protocol", """'[' + ','.join(['{"s":[]}'] * 400_000) + ']'"""),
    "many empty dicts": ("protocol", """'[' + ','.join(['{"d":[]}'] * 400_000) + ']'"""),
    "sets of few hashes": (
        "fail timeout",
        """'{"s":[' + ','.join('{"i":"%x"}' % ((k % 60) * M + k // 60)"""
        """ for k in range(99000)) + ']}'""",
    ),
    "long equal tuples": (
        "fail timeout",
        """'{"s":[' + ','.join('{"t":[' + '7,' * 1000 + '%d]}' % (k % 60 * M + k)"""
        """ for k in range(190)) + ']}'""",
    ),
    "nested frozensets": ("protocol", """'{"f":[' * 60 + ','.join(map(str, range(99000))) + ']}' * 60"""),
    "integers of 4300 digits": ("fail timeout", "'[' + ','.join(['9' * 4300] * 900) + ']'"),
    "a float of many digits": ("fail", "'0.' + '1' * 4_000_000"),
    "a million names": ("protocol", """'["E"' + ',"E"' * 1_000_000 + ']'"""),
}
REPLY = """
<CHANNEL>
<NONCE>
M = 2 ** 61 - 1
def f(x):
    data = frame('["%s","ok",' % nonce() + @REPLY@ + ']')
    for fd in channels():
        view = memoryview(data)
        while view: view = view[os.write(fd, view):]
    import time; time.sleep(60)
"""

# Honest ways to the same values.
VALUES = {
    "many empty sets of its own": ("fail", "[set() for _ in range(100_000)]"),
    "ranges of one hash of its own": (
        "protocol fail",
        "{range(k * (2**61 - 1), k * (2**61 - 1) + 1) for k in range(200)}",
    ),
    "empty ranges": ("fail", "[range(k, k) for k in range(10_000)]"),
    "a large dict of lists": ("fail", "{k: [] for k in range(100_000)}"),
}

SPECIAL = ("__eq__", "__ne__", "__lt__", "__bool__", "__len__", "__contains__", "__getattr__", "__call__", "__index__",
           "__hash__", "__instancecheck__", "__radd__", "__rsub__", "__array__")  # fmt: skip
PRETENDS = """
class P:
    def @NAME@(self, *args): return True
def f(x): return P()
"""
BASES = {"set": "{7}", "frozenset": "[7]", "bytes": "b'7'", "bytearray": "b'7'", "complex": "7",
         "__import__('collections').Counter": "'7'", "__import__('collections').OrderedDict": "{7: 7}"}  # fmt: skip
EQUAL = """
class Equal(@BASE@):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def f(x): return Equal(@VALUE@)
"""
EXCEPTIONS = ("SystemExit", "StopAsyncIteration", "AssertionError", "ImportError", "OSError", "TimeoutError",
              "UnicodeError", "Warning", "KeyError", "ArithmeticError", "MemoryError")  # fmt: skip
RAISES = "def f(x): raise @NAME@('passed')\n"

# One test with many calls. A program may stay within the limit of each call and never end them.
MANY_CALLS = f"result = [f(3) for _ in range(400)]\nassert result == {ANSWER}, result"
LASTING = {
    "sleeps within each call's limit": ("timeout", "import time\ndef f(x): time.sleep(0.4)"),
    "computes within each call's limit": ("timeout", "def f(x):\n    for _ in range(4_000_000): pass"),
    "sleeps for moments": ("timeout", "import time\ndef f(x):\n    while True: time.sleep(1e-6)"),
    "many replies that take long to decode": ("timeout", "a = [set() for _ in range(60_000)]\ndef f(x): return a"),
}
ENDLESS = f"for _ in range(f(3)): pass\nassert f(3) == {ANSWER}"  # a test that computes with the value

OUTSIDE = {
    "empty files": ("fail", """
import os
def f(x):
    for k in range(100_000): os.close(os.open(f'/tmp/{k}', os.O_CREAT))
    raise RuntimeError('LEAK')
"""),
    "empty folders": ("fail", """
import os
def f(x):
    for k in range(100_000): os.mkdir(f'/tmp/{k}')
    raise RuntimeError('LEAK')
"""),
    "symbolic links": ("fail", """
import os
def f(x):
    for k in range(100_000): os.symlink('a', f'/tmp/{k}')
    raise RuntimeError('LEAK')
"""),
    "more threads than allowed": ("fail", """
import threading, time
def f(x):
    for _ in range(100): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    raise RuntimeError('LEAK')
"""),
    "outlives its judge": ("timeout", """
import ctypes, time
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
def f(x):
    time.sleep(300)
"""),
    "installed packages": ("fail", """
import os, sys
def f(x):
    for folder in [p + '/site-packages' for p in sys.path] + ['/usr/lib/python3/dist-packages']:
        try: names = os.listdir(folder)
        except OSError: continue
        if names: raise RuntimeError('LEAK')
    return 0
"""),
    "files of the system": ("fail", """
def f(x):
    for path in ('/etc/passwd', '/etc/hostname', '/proc/version', '/proc/self/environ', '/sys/kernel/notes',
                 '/usr/share/doc', '/usr/lib/os-release', '/etc/ssl/openssl.cnf', '/var/log/dpkg.log'):
        try: file = open(path, 'rb')
        except OSError: continue
        raise RuntimeError('LEAK ' + path)
    return 0
"""),
}  # fmt: skip


def generated() -> dict[str, tuple[str, str, str]]:
    """Verdicts, program and test of each program by name. An empty test stands for the usual one."""
    out = {f"call {n}": ("fail crash", CALL.replace("@CALL@", c), "") for n, c in CALLS.items()}
    out |= {f"reply: {n}": (v, REPLY.replace("@REPLY@", r), "") for n, (v, r) in REPLIES.items()}
    out |= {f"value: {n}": (v, f"def f(x): return {r}\n", "") for n, (v, r) in VALUES.items()}
    out |= {f"pretends by {n}": ("fail", PRETENDS.replace("@NAME@", n), "") for n in SPECIAL}
    out |= {
        f"equal {n.rpartition('.')[2]}": ("fail", EQUAL.replace("@BASE@", n).replace("@VALUE@", v), "")
        for n, v in BASES.items()
    }
    out |= {
        f"raises {n}": ("oom" if n == "MemoryError" else "fail", RAISES.replace("@NAME@", n), "") for n in EXCEPTIONS
    }
    out |= {n: (v, p, MANY_CALLS) for n, (v, p) in LASTING.items()}
    out |= {n: (v, p.lstrip("\n"), "") for n, (v, p) in OUTSIDE.items()}
    out["a number for an endless test"] = ("timeout", "def f(x): return 10 ** 15\n", ENDLESS)
    return out
