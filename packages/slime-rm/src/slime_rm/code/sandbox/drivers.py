"""What the driver of a GPU needs of the system, and a program that calls it is therefore allowed, and no other. Standard library only.

Everything else holds as for any program. Where CUDA's driver lacks one of these, its `cuInit` fails with error 304, "OS call failed or
operation not supported on this OS". What it needs, and why:

- its devices, `/dev/nvidia*`, and `/sys`, read-only, where it finds out about the machine's memory and processors (`running.order`);
- `FILES`, read-only: the list of libraries, as the driver's own may lie in a folder that only this tells of;
- `/proc` (`confine`): `devices`, `modules`, `driver/nvidia` and `sys/vm/mmap_min_addr`, read-only; and of its own process `maps`, `ns/pid`
  and `task/<thread>/comm`, where, since version 570, it writes the names of its threads and takes an error for one of its own;
- `CALLS`.

Addresses without a limit are the caller's affair: it reserves more than there is memory.

Source: https://github.com/NVIDIA/OpenShell/pull/710 (`comm`, error 304); AppArmor's rules for CUDA in
https://github.com/canonical/snapd/blob/master/interfaces/builtin/opengl.go (files, socket).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

#: What is shown to such a program, where it is there, besides what its caller names.
FILES = ("/etc/ld.so.cache",)
_ALL = 0xFFFFFFFF
_MAP_HUGETLB = 0x40000
_AF_UNIX, _SOCK_SEQPACKET, _SOL_SOCKET, _SO_PASSCRED = 1, 5, 1, 16
#: Without the bits of SOCK_CLOEXEC and SOCK_NONBLOCK.
_SOCKET_KIND = 0xF


class Check(NamedTuple):
    """When a system call is forbidden, by one of its arguments."""

    argument: int
    mask: int
    value: int
    unless: bool = False
    """It is forbidden unless the argument under the mask is the value; else where it is."""


#: Calls that are forbidden to other programs -> what of them remains forbidden; nothing where that is empty.
#:
#: - `socket`, `setsockopt`: the driver listens on a socket without a file, `@cuda-uvmfd-...`, where processes that share memory of a GPU
#:   ask for its descriptor, and wants to be told who asks. In a namespace of its own nobody can.
#: - `mmap`: memory that it and the GPU both use it maps shared and without a file. Such memory can be kept where `watch` does not count it.
#:
#: `memfd_create` is not among them: the driver goes on without.
CALLS: Mapping[str, tuple[Check, ...]] = {
    "socket": (
        Check(0, _ALL, _AF_UNIX, unless=True),
        Check(1, _SOCKET_KIND, _SOCK_SEQPACKET, unless=True),
    ),
    "setsockopt": (
        Check(1, _ALL, _SOL_SOCKET, unless=True),
        Check(2, _ALL, _SO_PASSCRED, unless=True),
    ),
    "mmap": (Check(3, _MAP_HUGETLB, _MAP_HUGETLB),),
}
