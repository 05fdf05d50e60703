"""Settings of the C allocator for freed arrays, on CPU.

By default, glibc returns the memory of a large array to the kernel as soon as the array is freed. The kernel then
zeroes and maps every page of the next step's array again. An update of a model with 135M parameters causes 1.4 million
page faults and 6 s of system time. It takes 11 to 19 s on a virtual machine whose host reclaims memory that the guest
freed some seconds before (docs/performance.md).

Retained memory becomes fragmented, so a process grows beyond its need. 10 updates of changing shapes took 1.4 times the
memory, and one benchmark of plain JAX 17 GB. So call `release` for runs that need more than a third of a machine.
"""

from __future__ import annotations

import ctypes
import os
import platform

# malloc.h and mman.h of Linux.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX, MADV_HUGEPAGE = -1, -4, -8, 14
DEFAULT_TRIM, DEFAULT_MAPS = 128 * 1024, 65_536
GLIBC = platform.libc_ver()[0] == "glibc"
_retained = False


def _set(libc: ctypes.CDLL, *settings: tuple[int, int]) -> None:
    """Call ``mallopt`` for each (parameter, value). Raises RuntimeError when it refuses one."""
    for name, value in settings:
        if not libc.mallopt(name, value):
            raise RuntimeError(f"mallopt({name}, {value}) was refused")


def retain() -> None:
    """Keep freed memory in this process, and allow huge pages for half of the machine's memory.

    Call it before JAX starts its threads. Without glibc, it does nothing.
    """
    global _retained
    if not GLIBC:
        return
    _retained = True
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # One heap that never shrinks. Arenas of threads hold at most 64 MB; larger arrays would be mapped each time.
    _set(libc, (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1))
    # This reserves address space only. A kernel without huge pages refuses the advice, which does no harm.
    page = os.sysconf("SC_PAGE_SIZE")
    size = os.sysconf("SC_PHYS_PAGES") * page // 2
    if block := libc.malloc(size):
        libc.madvise(-(-block // page) * page, size - 2 * page, MADV_HUGEPAGE)
        libc.free(block)


def release() -> None:
    """Undo `retain`: return retained memory to the kernel, and the memory of large arrays when they are freed."""
    global _retained
    if not _retained:
        return
    _retained = False
    libc = ctypes.CDLL(None)
    libc.malloc_trim.argtypes = (ctypes.c_size_t,)
    _set(libc, (M_MMAP_MAX, DEFAULT_MAPS), (M_TRIM_THRESHOLD, DEFAULT_TRIM))
    libc.malloc_trim(0)
