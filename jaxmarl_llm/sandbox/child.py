"""What runs inside a jail: confine this process, load the program, answer calls. Nothing here is trusted afterwards.

The source of this file is handed to a fresh interpreter with ``-c``; it imports nothing from the project, and little
from the standard library, because every import is paid for at each start. The candidate shares this process and may
break all of it: what it can reach that way are the values it returns, which it decides anyway.

Frames are 4 bytes of length (big-endian) and a payload. Into the jail the payload is ``marshal`` (trusted data), out of
it the JSON that `encode` writes, to be read by `codec.decode` as data of an enemy.
"""

import _json
import builtins
import marshal
import os
import sys

DEPTH = 64  # levels of nesting of a result
ITEMS = 100_000  # elements of an iterator that are fetched
TAGS = {"tuple": "t", "set": "s", "frozenset": "f"}


class Unplain(Exception):
    """A result that is not plain data."""


def encode(value, depth=0):
    """JSON text of plain data. What JSON does not have becomes an object of one key (see `codec.decode`)."""
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
    if issubclass(kind, dict):  # Counter, defaultdict and OrderedDict with it
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


def quote(text):
    return _json.encode_basestring_ascii(str(text)[:300])


def raised(error):
    """The builtin classes an exception descends from, nearest first, and its message."""
    names = [c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins"]
    try:
        message = quote(error)
    except BaseException:
        message = '""'
    return f'"raised",[{",".join(map(quote, names))}],{quote(type(error).__name__)},{message}'


def read(channel, count):
    parts = []
    while count:
        part = os.read(channel, min(count, 1 << 20))
        if not part:
            os._exit(0)  # the judge has gone
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def receive(channel):
    return marshal.loads(read(channel, int.from_bytes(read(channel, 4), "big")))


def send(channel, text):
    data = memoryview(len(text).to_bytes(4, "big") + text.encode("ascii"))
    while data:
        data = data[os.write(channel, data) :]


def landlock(paths):
    """Leave this process reading beneath ``paths`` and nothing else of the file system. Linux >= 5.13."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    create, add, restrict = 444, 445, 446  # the same numbers on every architecture

    def call(number, *args):
        result = libc.syscall(ctypes.c_long(number), *args)
        if result < 0:
            raise OSError(ctypes.get_errno(), f"landlock: {os.strerror(ctypes.get_errno())}")
        return result

    abi = call(create, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    execute, read_file, read_dir = 1, 4, 8
    rights = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1  # files; 2: rename, 3: truncate, 5: ioctl
    handled = (ctypes.c_uint64 * 3)(rights, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)  # 4: TCP, 6: signals
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    rules = call(create, ctypes.byref(handled), ctypes.c_size_t(size), ctypes.c_uint(0))
    for path in paths:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        allowed = execute | read_file | (read_dir if os.path.isdir(path) else 0)  # execute: mapping of libraries
        rule = allowed.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
        call(add, ctypes.c_int(rules), ctypes.c_int(1), rule, ctypes.c_uint(0))
        os.close(fd)
    call(restrict, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)


def prctl(option, value, more=None):
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), more or zero, zero, zero):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def drop_capabilities():
    import ctypes

    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    if ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError("capset: refused")


def install(filter_):
    """Load a seccomp program that libseccomp has written."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    program = Program(len(filter_) // 8, filter_)
    prctl(22, 2, ctypes.byref(program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def confine(how):
    """Give up, for good, whatever the program must not have."""
    import resource

    null = os.open("/dev/null", os.O_RDWR)
    for name, value in how["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if how["uid"] is not None:
        os.setgroups([])
        os.setresgid(how["uid"], how["uid"], how["uid"])
        os.setresuid(how["uid"], how["uid"], how["uid"])
        if os.getresuid() != (how["uid"],) * 3:
            raise OSError("the user id did not change")
    if how["die_with"] is not None:
        prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL; a change of user id clears it, so it comes after
        if os.getppid() != how["die_with"]:
            os._exit(0)
    if how["readable"] is not None:
        prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
        drop_capabilities()
        landlock(how["readable"])
        install(how["filter"])
    for fd in (0, 1, 2):  # last: what goes wrong above is still heard
        os.dup2(null, fd)
    os.close(null)


def answer(scope, message):
    """One request to one JSON reply; whatever the program raises is part of the reply."""
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
    channel = int(sys.argv[1])
    how = receive(channel)
    confine(how)
    module = type(sys)("candidate")
    sys.modules["candidate"] = module  # dataclasses look their module up
    sys.argv = [""]
    send(channel, '"ready"')
    while True:
        message = receive(channel)
        reply = answer(module.__dict__, message)
        if len(reply) > how["reply_bytes"]:
            reply = f'["{message[0]}","unplain","a result of more than {how["reply_bytes"]} bytes"]'
        send(channel, reply)


if __name__ == "__main__":
    main()
