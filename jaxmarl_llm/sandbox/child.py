"""Code inside a jail: confine this process, load the program, and answer calls. Nothing it sends is trusted.

A new interpreter receives the source of this file with ``-c``. The file imports nothing from the project, and little of
the standard library, because each start repeats the imports. The generated program shares this process and may change
all of it. By that, the program only controls the values it returns, which it controls anyway.

A frame is 4 bytes of length (big-endian) and a payload. Payloads into the jail are ``marshal`` (trusted data). Payloads
out of the jail are the JSON of `encode`, which `codec.decode` reads as untrusted data.
"""

import _json
import builtins
import marshal
import os
import sys

DEPTH = 64  # allowed levels of nesting in a result
ITEMS = 100_000  # allowed elements of an iterator or a range in a result
ELEMENTS = 200_000  # allowed values, brackets included, in the JSON of a reply; a bound of the cost of decoding it
TAGS = {"tuple": "t", "set": "s", "frozenset": "f"}


class Unplain(Exception):
    """Error for a result that is not plain data."""


def encode(value, depth=0):
    """JSON text of plain data. A type that JSON lacks becomes an object with one key (see `codec.plain`).

    value: the result. depth: levels of nesting above it. Raises Unplain for other types.
    """
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    kind = type(value)
    if depth > DEPTH:
        raise Unplain(f"a result nested deeper than {DEPTH}")
    if issubclass(kind, str):
        return _json.encode_basestring_ascii(str.__str__(value))
    if issubclass(kind, int):
        value = int.__int__(value)
        return int.__repr__(value) if -(2**53) < value < 2**53 else f'{{"i":"{value:x}"}}'
    if issubclass(kind, float):
        text = float.__repr__(value)
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
    if issubclass(kind, list):
        return "[" + ",".join([encode(v, depth + 1) for v in list.__iter__(value)]) + "]"
    for base in (tuple, set, frozenset):
        if issubclass(kind, base):
            items = ",".join([encode(v, depth + 1) for v in base.__iter__(value)])
            return f'{{"{TAGS[base.__name__]}":[{items}]}}'
    if issubclass(kind, dict):  # also Counter, defaultdict and OrderedDict
        pairs = [f"[{encode(k, depth + 1)},{encode(v, depth + 1)}]" for k, v in dict.items(value)]
        return '{"d":[' + ",".join(pairs) + "]}"
    if issubclass(kind, (bytes, bytearray)):
        tag = "b" if issubclass(kind, bytes) else "a"
        return f'{{"{tag}":"{bytes(value).hex()}"}}'
    if issubclass(kind, complex):
        return f'{{"c":[{encode(value.real)},{encode(value.imag)}]}}'
    if kind is range:
        if len(value) > ITEMS:
            raise Unplain(f"a range of more than {ITEMS} elements")
        return f'{{"r":[{encode(value.start)},{encode(value.stop)},{encode(value.step)}]}}'
    if kind.__name__ == "Match" and kind.__module__ == "re":
        return '{"m":1}'
    if hasattr(kind, "__next__") or kind in (type({}.keys()), type({}.values()), type({}.items())):
        elements: list[str] = []
        for item in value:
            if len(elements) == ITEMS:
                raise Unplain(f"an iterator of more than {ITEMS} elements")
            elements.append(encode(item, depth + 1))
        return '{"n":[' + ",".join(elements) + "]}"
    raise Unplain(f"{kind.__module__}.{kind.__qualname__} is not plain data")


def elements(text):
    """Number of values in JSON ``text``, where each bracket adds one."""
    count = text.count(",") + text.count("[") + text.count("{")
    if count > ELEMENTS and '"' in text:  # many may stand in strings
        parts = text.replace("\\\\", "").replace('\\"', "").split('"')[::2]
        count = sum(part.count(",") + part.count("[") + part.count("{") for part in parts)
    return count


def quote(text):
    """JSON string of the first 300 characters of ``text``."""
    return _json.encode_basestring_ascii(str(text)[:300])


def raised(error):
    """Items of a JSON list for the exception ``error``: "raised", builtin classes (nearest first), class, message."""
    names = [c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins"]
    try:
        message = quote(error)
    except BaseException:
        message = '""'
    return f'"raised",[{",".join(map(quote, names))}],{quote(type(error).__name__)},{message}'


def read(channel, count):
    """Read ``count`` bytes from the descriptor ``channel``. Ends this process when the channel is closed."""
    parts = []
    while count:
        part = os.read(channel, min(count, 1 << 20))
        if not part:
            os._exit(0)  # the judge closed the channel
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def receive(channel):
    """Object of the next frame from the descriptor ``channel``. Ends this process when the channel is closed."""
    return marshal.loads(read(channel, int.from_bytes(read(channel, 4), "big")))


def send(channel, text):
    """Send ``text``, which is ASCII, as one frame to the descriptor ``channel``."""
    data = memoryview(len(text).to_bytes(4, "big") + text.encode("ascii"))
    while data:
        data = data[os.write(channel, data) :]


def call(number, *args):
    """Result of a system call. Raises OSError when it fails.

    number: the system call's number on this architecture. args: integers, bytes, and pointers.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return result


def landlock(paths):
    """Restrict this process by Landlock to reading below ``paths``. Needs Linux >= 5.13."""
    import ctypes

    create, add, restrict = 444, 445, 446  # system calls; the same numbers on every architecture
    abi = call(create, None, 0, 1)
    execute, read_file, read_dir = 1, 4, 8
    rights = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1  # ABI 2: rename, 3: truncate, 5: ioctl
    handled = (ctypes.c_uint64 * 3)(rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)  # ABI 4 adds TCP, 6 signals
    rules = call(create, ctypes.byref(handled), 8 if abi < 4 else 16 if abi < 6 else 24, 0)
    for path in paths:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = execute | read_file | (read_dir if os.path.isdir(path) else 0)  # execute: needed to map libraries
        rule = allowed.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
        call(add, rules, 1, rule, 0)
        os.close(fd)
    call(restrict, rules, 0)
    os.close(rules)


def prctl(option, value, more=None):
    """Call ``prctl`` of the C library. Raises OSError when it fails.

    option: number of the operation (PR_...). value: its first argument, an integer. more: its second argument, such as
    a pointer; None: 0. The others are 0.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), more or zero, zero, zero):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def set_capabilities(bits):
    """Reduce the capabilities of this process to ``bits`` (bit number: capability)."""
    import ctypes

    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    if ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)(bits, bits)):
        raise OSError("capset: refused")


def change_user(uid, capabilities):
    """Take the user and group id ``uid``, and keep only the capabilities in ``capabilities`` (bits)."""
    if capabilities:
        prctl(8, 1)  # PR_SET_KEEPCAPS: the change of the user id clears them otherwise
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if os.getresuid() != (uid,) * 3:
        raise OSError("the user id did not change")


def mount_tmp(limits):
    """Mount a writable /tmp. limits: size in bytes and number of files, as options of tmpfs.

    bubblewrap limits the size alone. Empty files have no size and take memory of the kernel.
    """
    import ctypes

    flags = 2 | 4 | 8  # MS_NOSUID, MS_NODEV, MS_NOEXEC
    if ctypes.CDLL(None).mount(b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(flags), limits.encode()):
        raise OSError("no /tmp can be mounted")
    os.chdir("/tmp")


def install(filter_):
    """Install a seccomp filter. ``filter_``: BPF program."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    program = Program(len(filter_) // 8, filter_)
    prctl(22, 2, ctypes.byref(program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def confine(how):
    """Permanently remove rights that the program must not have.

    how: rlimits, tmp (options of `mount_tmp`), uid, capabilities (bits to keep), die_with (process id of the judge),
    readable (paths) and filter (BPF program). None leaves one out.
    """
    import resource

    null = os.open("/dev/null", os.O_RDWR)
    if how["tmp"] is not None:
        mount_tmp(how["tmp"])
    for name, value in how["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if how["uid"] is not None:
        change_user(how["uid"], how["capabilities"])
    if how["die_with"] is not None:
        prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL; a change of the user id would clear it
        if os.getppid() != how["die_with"]:
            os._exit(0)
    if how["filter"] is not None or how["readable"] is not None:
        prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
        set_capabilities(how["capabilities"])
    if how["readable"] is not None:
        # The folder of the library is not readable, because it contains the folder of installed packages. The import
        # system keeps its list of the folder.
        sys.meta_path[-1].find_spec("no_such_module", None)
        landlock(how["readable"])
    if how["filter"] is not None:
        install(how["filter"])
    for fd in (0, 1, 2):  # last, so that errors above still reach stderr
        os.dup2(null, fd)
    os.close(null)


def answer(scope, message):
    """JSON reply to one request. An exception of the program becomes part of the reply.

    scope: global names of the program. message: (nonce, verb, arguments); the verb is "load" or "call".
    """
    nonce, verb, *rest = message
    try:
        if verb == "load":
            exec(builtins.compile(rest[0], "<program>", "exec", dont_inherit=True), scope)
            return f'["{nonce}","ok",null]'
        name, args, kwargs = rest
        if name not in scope:
            return f'["{nonce}","raised",["NameError"],"NameError",{quote(f"the program defines no {name!r}")}]'
        return f'["{nonce}","ok",{encode(scope[name](*args, **kwargs))}]'
    except Unplain as error:
        return f'["{nonce}","unplain",{quote(error)}]'
    except BaseException as error:
        return f'["{nonce}",{raised(error)}]'


def main():
    """Confine this process, then answer requests until the channel closes."""
    channel = int(sys.argv[1])
    how = receive(channel)
    confine(how)
    module = type(sys)("candidate")
    sys.modules["candidate"] = module  # dataclasses look up their module
    sys.argv = [""]
    send(channel, '"ready"')
    while True:
        message = receive(channel)
        reply = answer(module.__dict__, message)
        if len(reply) > how["reply_bytes"]:
            reply = f'["{message[0]}","unplain","a result of more than {how["reply_bytes"]} bytes"]'
        elif elements(reply) > ELEMENTS:
            reply = f'["{message[0]}","unplain","a result of more than {ELEMENTS} elements"]'
        send(channel, reply)


if __name__ == "__main__":
    main()
