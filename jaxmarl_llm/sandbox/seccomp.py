"""System calls that a jailed program must not make, as a BPF program that libseccomp generates."""

from __future__ import annotations

import ctypes
import errno
import functools
import os

# Denied system calls. This is not a list of allowed calls, because interpreters and C libraries use different calls.
# Behind the filter, namespaces or Landlock also protect the system.
_DENIED = """
    fork vfork execveat unshare setns
    kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal pidfd_open pidfd_getfd
    ptrace process_vm_readv process_vm_writev process_madvise kcmp
    socket socketpair socketcall
    mount umount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr
    name_to_handle_at open_by_handle_at quotactl quotactl_fd fanotify_init
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat mknod mknodat
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr setxattrat removexattrat
    utime utimes utimensat futimesat
    keyctl add_key request_key bpf perf_event_open userfaultfd lookup_dcookie
    io_uring_setup io_uring_enter io_uring_register io_setup io_submit
    shmget shmat shmctl msgget semget mq_open memfd_create memfd_secret
    kexec_load kexec_file_load init_module finit_module delete_module create_module reboot swapon swapoff
    acct syslog settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname iopl ioperm
    personality modify_ldt vhangup setpriority ioprio_set sched_setscheduler sched_setparam sched_setattr
    sched_setaffinity migrate_pages move_pages process_mrelease truncate truncate64
    landlock_create_ruleset seccomp
"""
CLONE_THREAD = 0x10000
NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
IOCTLS = (0x5412, 0x541C, 0x8901, 0x8902)  # TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP
FCNTLS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX, which could send signals
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # SCMP_ACT_*
_NOT_EQUAL, _MASKED_EQUAL = 1, 7  # SCMP_CMP_*


class _Compare(ctypes.Structure):
    """``struct scmp_arg_cmp`` of libseccomp: a condition on one argument of a system call."""

    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


@functools.cache
def seccomp_filter(with_exec: bool) -> bytes | None:
    """Filter as a BPF program from libseccomp; None where libseccomp is not installed.

    with_exec: allow execve, because the filter is installed before the interpreter starts. A call of another
    architecture (32-bit calls on x86-64) kills the process, which is the default of libseccomp.
    """
    try:
        lib = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    lib.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(lib.seccomp_init(ctypes.c_uint32(_ALLOW)))
    refuse, absent = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS

    def rule(action: int, name: str, *compare: _Compare) -> None:
        """Add a rule for the system call ``name`` under conditions on its arguments."""
        number = lib.seccomp_syscall_resolve_name(name.encode())
        if number != -1:  # otherwise this version of libseccomp does not know the call
            array = (_Compare * max(len(compare), 1))(*compare)
            result = lib.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(compare), array)
            # Calls of other architectures have negative numbers, and libseccomp may refuse them.
            if result and number >= 0:
                raise OSError(-result, f"libseccomp: {name}: {os.strerror(-result)}")

    try:
        for name in _DENIED.split():
            rule(refuse, name)
        if not with_exec:
            rule(refuse, "execve")
        # A filter cannot read the flags of clone3. Without clone3, the C library uses clone.
        rule(absent, "clone3")
        rule(refuse, "clone", _Compare(0, _MASKED_EQUAL, CLONE_THREAD, 0))
        for bit in range(32):
            if NAMESPACES >> bit & 1:
                rule(refuse, "clone", _Compare(0, _MASKED_EQUAL, 1 << bit, 1 << bit))
        rule(refuse, "prlimit64", _Compare(0, _NOT_EQUAL, 0, 0))  # limits of another process
        for name, requests in {"ioctl": IOCTLS, "fcntl": FCNTLS}.items():
            for request in requests:  # the kernel reads only 32 bits
                rule(refuse, name, _Compare(1, _MASKED_EQUAL, 0xFFFFFFFF, request))
        fd = memory_file(b"")
        try:
            if lib.seccomp_export_bpf(context, fd):
                return None
            return os.pread(fd, 1 << 20, 0)
        finally:
            os.close(fd)
    finally:
        lib.seccomp_release(context)


def memory_file(data: bytes) -> int:
    """Descriptor of an anonymous file with ``data``, at its start."""
    fd = os.memfd_create("sandbox")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
