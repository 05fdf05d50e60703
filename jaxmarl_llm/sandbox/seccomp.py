"""System calls that a jailed program may make: an allow-list by number, as a program for seccomp.

A call that is not on the list is refused, whatever its name and age. A new kernel adds calls, and none of them is
allowed. The list holds what CPython and the C library need to compute, to use threads, and to use files.

Refused calls return EPERM. Calls that are newer than number `NEWER` return ENOSYS, so that a C library takes its older
way. A call of another architecture (32-bit calls and x32 on x86-64) ends the process.
"""

from __future__ import annotations

import errno
import functools
import os
import struct

# Name, number on x86-64, number on AArch64.
_ALLOWED = """
    read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215,
    brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67, pwrite64 18 68,
    readv 19 65, writev 20 66, preadv 295 69, pwritev 296 70, mremap 25 216, madvise 28 233, dup 32 23,
    dup3 292 24, nanosleep 35 101, clock_nanosleep 230 115, getitimer 36 102, setitimer 38 103, getpid 39 172,
    gettid 186 178, getppid 110 173, exit 60 93, exit_group 231 94, uname 63 160, fsync 74 82, fdatasync 75 83,
    ftruncate 77 46, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, renameat 264 38,
    renameat2 316 276, mkdirat 258 34, unlinkat 263 35, linkat 265 37, symlinkat 266 36, readlinkat 267 78,
    openat 257 56, newfstatat 262 79, statx 332 291, faccessat 269 48, faccessat2 439 439, getrlimit 97 163,
    setrlimit 160 164, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, geteuid 107 175,
    getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, umask 95 166,
    gettimeofday 96 169, clock_gettime 228 113, clock_getres 229 114, getrandom 318 278, futex 202 98,
    set_robust_list 273 99, rseq 334 293, sched_getaffinity 204 123, sigaltstack 131 132,
    restart_syscall 219 128, rt_sigpending 127 136, rt_sigsuspend 130 133, rt_sigtimedwait 128 137,
    getcpu 309 168, wait4 61 260, waitid 247 95, sendfile 40 71, copy_file_range 326 285, pipe2 293 59,
    ppoll 271 73, pselect6 270 72, close_range 436 436, open 2 -, stat 4 -, lstat 6 -, access 21 -, pipe 22 -,
    select 23 -, poll 7 -, dup2 33 -, getdents 78 -, rename 82 -, mkdir 83 -, rmdir 84 -, link 86 -,
    unlink 87 -, symlink 88 -, readlink 89 -, pause 34 -, alarm 37 -, getpgrp 111 -, time 201 -
"""
_COLUMN = {"x86_64": 1, "aarch64": 2}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
X32 = 0x40000000  # bit of the x32 calls, which have the architecture of x86-64
NEWER = 424  # first number that all architectures share
CLONE_THREAD = 0x10000
NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

# Conditional calls: name, numbers, index of the argument, its allowed values, and the error of the others. The kernel
# reads 32 bits of these arguments. prctl: PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_GET_SECCOMP,
# PR_GET_NO_NEW_PRIVS; not PR_SET_PDEATHSIG, which would let the process outlive its judge. ioctl: TCGETS, TIOCGWINSZ,
# FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; not FS_IOC_SETFLAGS. fcntl: descriptors and their flags, size of a pipe; no
# locks, leases, watches of folders, or owners of signals. prlimit64: this process alone.
_CONDITIONAL = (
    ("prctl", (157, 167), 0, (3, 15, 16, 21, 39), errno.EPERM),
    ("ioctl", (16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451), errno.ENOTTY),
    ("fcntl", (72, 25), 1, (0, 1, 2, 3, 4, 1030, 1032), errno.EPERM),
    ("prlimit64", (302, 261), 0, (0,), errno.EPERM),
)
_CLONE = (56, 220)
# Calls whose absence the standard library expects: extended attributes, which copying a file reads.
_ABSENT = {"x86_64": range(191, 197), "aarch64": range(8, 14)}

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF instructions
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # SECCOMP_RET_*
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data; both architectures are little-endian


def allowed(machine: str) -> dict[str, int]:
    """Numbers of the calls that are allowed with any arguments, by name. machine: name as of `os.uname`."""
    rows = (entry.split() for entry in _ALLOWED.replace("\n", " ").split(","))
    column = _COLUMN[machine]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One BPF instruction. if_true, if_false: instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _return(value: int) -> bytes:
    """Instruction that ends the filter with this decision."""
    return _instruction(_RETURN, value)


def _argument(index: int) -> bytes:
    """Instruction that loads the low 32 bits of an argument."""
    return _instruction(_LOAD, _ARGUMENTS + 8 * index)


def _only_for(number: int, body: list[bytes]) -> list[bytes]:
    """Instructions that run ``body``, which decides, for the call ``number`` alone."""
    return [_instruction(_EQUAL, number, 0, len(body)), *body]


@functools.cache
def seccomp_filter(refusal: int | None = None) -> bytes | None:
    """Filter for this machine as a BPF program; None on an architecture that the list does not know.

    refusal: error number of all refused calls. None stands for the numbers that this module names. A test gives a
    number that no call of the kernel returns.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        return None
    column = _COLUMN[machine] - 1

    def refuse(number: int) -> bytes:
        return _return(_ERRNO | (number if refusal is None else refusal))

    code = [_instruction(_LOAD, _ARCHITECTURE), _instruction(_EQUAL, ARCHITECTURES[machine], 1, 0), _return(_KILL)]
    code += [_instruction(_LOAD, _NUMBER), _instruction(_AT_LEAST, X32, 0, 1), _return(_KILL)]
    for number in sorted(allowed(machine).values()):
        code += _only_for(number, [_return(_ALLOW)])
    for _, numbers, index, values, error in _CONDITIONAL:
        body = [_argument(index)]
        for value in values:
            body += [_instruction(_EQUAL, value, 0, 1), _return(_ALLOW)]
        code += _only_for(numbers[column], [*body, refuse(error)])
    # A thread is allowed, a process and a namespace are not. clone3 is refused, because a filter cannot read its flags.
    thread = [_argument(0), _instruction(_ANY_BIT, NAMESPACES, 1, 0), _instruction(_ANY_BIT, CLONE_THREAD, 1, 0)]
    code += _only_for(_CLONE[column], [*thread, refuse(errno.EPERM), _return(_ALLOW)])
    for number in _ABSENT[machine]:
        code += _only_for(number, [refuse(errno.ENOTSUP)])
    code += [_instruction(_AT_LEAST, NEWER, 0, 1), refuse(errno.ENOSYS), refuse(errno.EPERM)]
    return b"".join(code)
