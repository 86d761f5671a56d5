"""The system calls that a confined program may not make, as a seccomp filter. Standard library only.

Namespaces already take away files, network and other processes; the filter takes away the calls by which a program
could get powers back in a namespace of its own, look into other processes, reach rarely used parts of the kernel, or
have memory that `watch` cannot count. A program that calls a GPU's driver may make a few of them (`drivers`).
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from slime_rm.code.sandbox.drivers import CALLS, Check

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _AND, _JUMP_EQUAL, _JUMP_ABOVE, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_X32_BIT = 0x40000000

#: Machine -> (audit number, call -> number). Source: the kernel's tables.
_X86_64 = {
    "socket": 41, "ptrace": 101, "clone": 56, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
    "unshare": 272, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249,
    "open_by_handle_at": 304, "name_to_handle_at": 303, "init_module": 175, "finit_module": 313,
    "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "swapon": 167, "swapoff": 168,
    "acct": 163, "quotactl": 179, "sethostname": 170, "setdomainname": 171, "personality": 135, "syslog": 103,
    "fanotify_init": 300, "mknod": 133, "mknodat": 259, "iopl": 172, "ioperm": 173, "clone3": 435,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "pidfd_getfd": 438,
    "pidfd_send_signal": 424, "mount_setattr": 442, "quotactl_fd": 443, "process_madvise": 440,
    "memfd_create": 319, "memfd_secret": 447, "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240,
    "vmsplice": 278, "setsockopt": 54, "io_setup": 206, "inotify_init": 253, "inotify_init1": 294,
    "mmap": 9, "madvise": 28, "fcntl": 72,
}  # fmt: skip
_AARCH64 = {
    "socket": 198, "ptrace": 117, "clone": 220, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
    "unshare": 97, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "bpf": 280,
    "perf_event_open": 241, "userfaultfd": 282, "keyctl": 219, "add_key": 217, "request_key": 218,
    "open_by_handle_at": 265, "name_to_handle_at": 264, "init_module": 105, "finit_module": 273,
    "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294, "reboot": 142, "swapon": 224, "swapoff": 225,
    "acct": 89, "quotactl": 60, "sethostname": 161, "setdomainname": 162, "personality": 92, "syslog": 116,
    "fanotify_init": 262, "mknodat": 33, "clone3": 435,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434, "pidfd_getfd": 438,
    "pidfd_send_signal": 424, "mount_setattr": 442, "quotactl_fd": 443, "process_madvise": 440,
    "memfd_create": 279, "memfd_secret": 447, "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180,
    "vmsplice": 75, "setsockopt": 208, "io_setup": 0, "inotify_init1": 26,
    "mmap": 222, "madvise": 233, "fcntl": 25,
}  # fmt: skip
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}
#: Calls that are forbidden with some arguments. The bits of a new namespace (NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER,
#: NEWPID, NEWNET, NEWTIME) are asked for one by one.
_ARGUMENTS = {
    "clone": tuple(
        Check(0, bit, bit) for bit in (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30, 1 << 7)
    ),
    # MAP_SHARED or MAP_SHARED_VALIDATE with MAP_ANONYMOUS: its pages outlive the look of a process; MAP_HUGETLB.
    "mmap": (Check(3, 0x21, 0x21), Check(3, 0x40000, 0x40000)),
    "madvise": (Check(2, 0xFFFFFFFF, 21),),  # MADV_PAGEOUT
    "fcntl": (Check(1, 0xFFFFFFFF, 1031),),  # F_SETPIPE_SZ
}
#: libc falls back to `clone`, whose flags can be looked at, when there is no `clone3`.
_UNKNOWN = frozenset({"clone3"})


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def program(machine: str, *, for_driver: bool = False) -> bytes:
    """Return the filter for a machine: forbidden calls fail with EPERM, calls of another architecture kill.

    Args:
        machine: as `platform.machine` tells it.
        for_driver: for a program that calls a GPU's driver.

    Raises:
        OSError: the machine is none whose calls are known.
    """
    if machine not in _MACHINES:
        raise OSError(
            errno.ENOSYS, f"no filter of system calls for {machine}, only for {', '.join(_MACHINES)}"
        )
    audit, calls = _MACHINES[machine]
    code = [
        _step(_LOAD, _ARCH_AT),
        _step(_JUMP_EQUAL, audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        _step(_JUMP_ABOVE, _X32_BIT, 0, 1),
        _step(_RETURN, _KILL),
    ]
    arguments = {**_ARGUMENTS, **CALLS} if for_driver else _ARGUMENTS
    for name, number in calls.items():
        refuse = _step(_RETURN, _ERRNO | (errno.ENOSYS if name in _UNKNOWN else errno.EPERM))
        checks = arguments.get(name)
        then = [refuse] if checks is None else []
        for argument, mask, value, unless in checks or ():
            then += [
                _step(_LOAD, _ARGUMENTS_AT + 8 * argument),
                _step(_AND, mask),
                _step(_JUMP_EQUAL, value, 1, 0) if unless else _step(_JUMP_EQUAL, value, 0, 1),
                refuse,
            ]
        if checks is not None:
            then.append(_step(_RETURN, _ALLOW))
        code += [_step(_JUMP_EQUAL, number, 0, len(then)), *then]
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def forbid(*, for_driver: bool = False) -> None:
    """Put the filter on this process and all that it starts, for good.

    Args:
        for_driver: it calls a GPU's driver.

    Raises:
        OSError: the kernel cannot, or the machine is not known.
    """
    code = program(platform.machine(), for_driver=for_driver)
    libc = ctypes.CDLL(None, use_errno=True)
    filter_ = _Program(len(code) // 8, code)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, if_true, if_false, value)
