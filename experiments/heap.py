"""What the C allocator does with freed arrays, on CPU.

glibc gives a large array back to the kernel as soon as it is freed, and the next step's array is new: every page of it
is zeroed and mapped again. An update of a model of 135M parameters is 1.4 million page faults, 6 s of system time, and
12 to 19 s on a virtual machine whose host takes back what its guest has freed for some seconds (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import os
import platform

# malloc.h and mman.h of Linux.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX, MADV_HUGEPAGE = -1, -4, -8, 14


def keep() -> bool:
    """Freed memory stays with this process, and half of the machine's memory may come as huge pages.

    Call it before JAX starts its threads. The process then stays as large as it was at its largest. False, and nothing
    done, where the C library is not glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # All from one heap (arenas of threads hold 64 MB at most, what is larger is mapped anew), which never shrinks.
    for name, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
        if not libc.mallopt(name, value):
            raise RuntimeError(f"mallopt({name}, {value}) was refused")
    # Address space alone, until it is written to. A kernel without huge pages refuses the advice: nothing is lost.
    page = os.sysconf("SC_PAGE_SIZE")
    size = os.sysconf("SC_PHYS_PAGES") * page // 2
    if block := libc.malloc(size):
        libc.madvise(-(-block // page) * page, size - 2 * page, MADV_HUGEPAGE)
        libc.free(block)
    return True
