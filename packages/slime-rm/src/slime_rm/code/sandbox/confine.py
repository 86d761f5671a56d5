"""The inside of the sandbox: confines this process, then becomes the program. Imports the standard library only.

Descriptor 3 gives `main` the order as JSON; on descriptor 4 goes one JSON object a line: `{"ready": true}` right before the
program starts, `{"status": N}` with its wait status when it has ended, `{"memory": true}` when it was killed for its
memory, or `{"error": "..."}` when something that the confinement needs is not to be had. Nothing of the program runs
before all of it stands.

The processes: this one watches the memory from outside; its child, process 1 of the new namespaces, builds the file
system and waits inside; the program is that one's child. When process 1 ends, the kernel ends all that is left in the
namespace.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from slime_rm.code.sandbox.filter import forbid
from slime_rm.code.sandbox.watch import go_first, watch

ORDER, REPORT = 3, 4
NOBODY = 65534
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 2, 1, 4
_AT_FDCWD, _AT_RECURSIVE, _SYS_MOUNT_SETATTR = -100, 0x8000, 442
_READ_ONLY_NO_SETUID = 0x1 | 0x2
_CAPABILITY_VERSION_3 = 0x20080522
#: Without `zero`, which can be mapped as memory that `watch` does not see.
_DEVICES = ("null", "urandom", "random")
#: Files of `/proc` that tell of the machine and of no process.
_ON_THE_MACHINE = (
    "/proc/cpuinfo",
    "/proc/devices",
    "/proc/driver",
    "/proc/meminfo",
    "/proc/modules",
    "/proc/version",
)

#: Becomes the program: closes the descriptor that it gets when it begins, or writes there why it cannot.
Program = Callable[[int, dict[str, Any]], NoReturn]

libc = ctypes.CDLL(None, use_errno=True)


def main() -> NoReturn:
    """Confine, run the program, report, and exit."""
    confine(json.loads(_read_all(ORDER)), _execute)


def confine(order: dict[str, Any], program: Program, *, kept: tuple[int, ...] = ()) -> NoReturn:
    """Confine this process, which must have one thread, run a program in it, report, and exit.

    Args:
        order: `running.order`.
        program: what is run when everything stands.
        kept: descriptors that the program has besides standard input, output and error, which process 1 has not.
    """
    go_first()  # while the machine's users are this process's own
    try:
        _new_namespaces()
    except OSError as error:
        _report({"error": f"{error.strerror or error}"})
        os._exit(1)
    os.chdir("/proc")  # before process 1 puts another root in the place of this one
    first = os.fork()
    if first == 0:
        _be_first(order, program, kept)
    if watch(first, order["memory_bytes"], "/box"):
        _report({"memory": True})
    os._exit(0)


def _new_namespaces() -> None:
    """Leave the users, files, network, processes and shared memory of the machine."""
    user, group = os.getuid(), os.getgid()
    asked, ask = os.pipe()
    done, tell = os.pipe()
    helper = os.fork()
    if helper == 0:  # only a process that stays outside may map more users than itself
        os.close(ask)
        try:
            if os.read(asked, 1):
                _map_users(os.getppid(), user, group)
                os.write(tell, b"x")
        finally:
            os._exit(0)
    os.close(tell)
    kinds = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    _check(libc.unshare(kinds), "unshare: user namespaces are not to be had here")
    os.write(ask, b"x")
    mapped = os.read(done, 1)
    os.waitpid(helper, 0)
    if not mapped:
        raise OSError(0, "the users of the new namespace cannot be mapped")


def _map_users(process: int, user: int, group: int) -> None:
    """Root becomes nobody inside, so that limits count for it; anybody else stays who it is."""
    extra = f"\n{NOBODY} {NOBODY} 1" if user == 0 else ""
    Path(f"/proc/{process}/setgroups").write_text("deny")
    Path(f"/proc/{process}/uid_map").write_text(f"{user} {user} 1{extra}")
    Path(f"/proc/{process}/gid_map").write_text(f"{group} {group} 1{extra}")


def _be_first(order: dict[str, Any], become: Program, kept: tuple[int, ...]) -> NoReturn:
    """Be process 1: build the file system, start the program, report its end."""
    try:
        _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
        _build_root(order)
        started, starting = os.pipe()
        program = os.fork()
        if program == 0:
            os.close(started)
            _become(order, starting, become, kept)
        os.close(starting)
        error = _read_all(started)
        if error:
            _report({"error": error})
            os._exit(1)
        _report({"ready": True})
        for descriptor in (0, 1, 2, *kept):
            os.close(descriptor)  # so that the end of the output is the end of the program's processes
        while (ended := os.waitpid(-1, 0))[0] != program:
            pass
        _report({"status": ended[1]})
    except OSError as error:
        _report({"error": f"{error.strerror or error}"})
    finally:
        os._exit(0)


def _build_root(order: dict[str, Any]) -> None:
    """Make a root of nothing but what the interpreter needs, read-only, and a small folder `/box`."""
    root = order["root"]
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    for path in order["visible"]:
        inside = Path(root + path)
        inside.parent.mkdir(parents=True, exist_ok=True)
        if os.path.islink(path):
            inside.symlink_to(os.readlink(path))
        elif os.path.isdir(path) and not inside.exists():
            inside.mkdir()
            _bind(path, str(inside))
    Path(root, "dev").mkdir()
    for path in (*(f"/dev/{name}" for name in _DEVICES), *order["shown"]):
        _show(path, root)
    if order["for_driver"]:
        _show_proc(root)
    box = Path(root, "box")
    box.mkdir()
    given = sum(len(text.encode(errors="surrogatepass")) for text in order["files"].values())
    size = f"size={order['disk_bytes'] + given},nr_inodes=1024,mode=755"
    _mount("tmpfs", str(box), "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    for name, text in order["files"].items():
        (box / name).write_bytes(text.encode(errors="surrogatepass"))  # what is no text fails as a program
    for path in order["folders"]:
        own = Path(str(box) + path)
        own.mkdir(parents=True, exist_ok=True)
        Path(root + path).parent.mkdir(parents=True, exist_ok=True)
        Path(root + path).symlink_to("/box" + path)
    if os.getuid() == 0:
        for folder, _, _ in os.walk(box):
            os.chown(folder, NOBODY, NOBODY)
    old = Path(root, "old")
    old.mkdir()
    _check(libc.syscall(_PIVOT_ROOT[os.uname().machine], root.encode(), str(old).encode()), "pivot_root")
    os.chdir("/box")
    _check(libc.umount2(b"/old", _MNT_DETACH), "umount2")
    os.rmdir("/old")
    _seal("/", recursive=False)


def _become(order: dict[str, Any], starting: int, become: Program, kept: tuple[int, ...]) -> NoReturn:
    """Give up what is left of power, take on the limits, and become the program."""
    try:
        os.setsid()
        for name, value in order["limits"].items():
            kind = getattr(resource, name)
            if kind == resource.RLIMIT_NPROC and os.getuid() != 0:
                value += 2  # this user's two processes of ours count as well
            hard = resource.getrlimit(kind)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (most, most))
        if os.getuid() == 0:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        _give_up_capabilities()
        # A program that is no file to execute stays as it is made by another user: the kernel then tells `watch` nothing of its pages.
        _check(libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl(PR_SET_DUMPABLE)")
        os.set_inheritable(starting, False)
        first = 3
        for last in sorted({starting, *kept}):
            os.closerange(first, last)
            first = last + 1
        os.closerange(first, 1024)
        forbid(for_driver=order["for_driver"])
        become(starting, order)
    except BaseException as error:
        os.write(starting, str(error).encode())
    finally:
        os._exit(1)


def _give_up_capabilities() -> None:
    """Give up what the user namespace's maker has there; a program that is no file to execute would keep it."""
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _check(libc.capset(header, none), "capset")


def _execute(_: int, order: dict[str, Any]) -> NoReturn:
    os.execve(order["argv"][0], order["argv"], order["environment"])


def _show(path: str, root: str) -> None:
    """Show a device, a file or a folder at its own place, read-only; a device can be written to all the same."""
    inside = Path(root + path)
    inside.parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(path):
        inside.mkdir(exist_ok=True)
    else:
        inside.touch()
    _bind(path, str(inside))


def _show_proc(root: str) -> None:
    """Mount a `/proc` that has the program's processes alone; a container may not, and then files on the machine are shown.

    All of it is read-only but for the folders of processes, of which the program may write its own (`drivers`).
    """
    folder = Path(root, "proc")
    folder.mkdir()
    try:
        _mount("proc", str(folder), "proc", _MS_NOSUID | _MS_NODEV, "hidepid=2")
    except OSError:
        for path in filter(os.path.exists, _ON_THE_MACHINE):
            _show(path, root)
    else:
        for each in folder.iterdir():
            if not each.name.isdecimal() and not each.is_symlink():
                _bind(str(each), str(each))


def _bind(source: str, target: str) -> None:
    """Show `source` at `target`, read-only, with all that is mounted below it."""
    _mount(source, target, None, _MS_BIND | _MS_REC)
    _seal(target, recursive=True)


def _seal(target: str, *, recursive: bool) -> None:
    """Make what is mounted at `target` read-only, and deaf to set-user-id bits."""
    attributes = struct.pack("=QQQQ", _READ_ONLY_NO_SETUID, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), flags, attributes, len(attributes))
    _check(result, f"mount_setattr({target})")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    result = libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _check(result, f"mount({target})")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _read_all(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read().decode()


def _report(message: dict[str, Any]) -> None:
    os.write(REPORT, json.dumps(message).encode() + b"\n")


_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
