"""What the C allocator does with freed arrays, on CPU.

glibc gives a large array back to the kernel as soon as it is freed, and the next step's array is new: every page of it
is zeroed and mapped again. An update of a model of 135M parameters is 1.4 million page faults, 6 s of system time, and
11 to 19 s on a virtual machine whose host takes back what its guest has freed for some seconds (docs/performance.md).

Kept memory is cut into pieces, so that a process grows beyond what it needs at once: 10 updates of changing
shapes came to 1.4 times what they take otherwise, one benchmark of naive JAX to 17 GB. `give_back` is for what needs
more than a third of a machine.
"""

from __future__ import annotations

import ctypes
import os
import platform

# malloc.h and mman.h of Linux.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX, MADV_HUGEPAGE = -1, -4, -8, 14
DEFAULT_TRIM, DEFAULT_MAPS = 128 * 1024, 65_536
GLIBC = platform.libc_ver()[0] == "glibc"
_kept = False


def _set(libc: ctypes.CDLL, *settings: tuple[int, int]) -> None:
    for name, value in settings:
        if not libc.mallopt(name, value):
            raise RuntimeError(f"mallopt({name}, {value}) was refused")


def keep() -> None:
    """Freed memory stays with this process, and half of the machine's memory may come as huge pages.

    Call it before JAX starts its threads. Nothing is done where the C library is not glibc.
    """
    global _kept
    if not GLIBC:
        return
    _kept = True
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # All from one heap (arenas of threads hold 64 MB at most, what is larger is mapped anew), which never shrinks.
    _set(libc, (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1))
    # Address space alone, until it is written to. A kernel without huge pages refuses the advice: nothing is lost.
    page = os.sysconf("SC_PAGE_SIZE")
    size = os.sysconf("SC_PHYS_PAGES") * page // 2
    if block := libc.malloc(size):
        libc.madvise(-(-block // page) * page, size - 2 * page, MADV_HUGEPAGE)
        libc.free(block)


def give_back() -> None:
    """After `keep`: large arrays are the kernel's again when they are freed, and so is what was kept until now."""
    global _kept
    if not _kept:
        return
    _kept = False
    libc = ctypes.CDLL(None)
    libc.malloc_trim.argtypes = (ctypes.c_size_t,)
    _set(libc, (M_MMAP_MAX, DEFAULT_MAPS), (M_TRIM_THRESHOLD, DEFAULT_TRIM))
    libc.malloc_trim(0)
