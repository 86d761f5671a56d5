"""What a Dockerfile says that needs no Docker: working folder, files and environment variables."""

from __future__ import annotations

import io
import posixpath
import shlex
import tarfile
from dataclasses import dataclass, field
from pathlib import Path

from slime_core.errors import DataError

_DEFAULT_FOLDER = "/app"


@dataclass
class Layout:
    """What a container begins as, without its image."""

    workdir: str = _DEFAULT_FOLDER
    env: dict[str, str] = field(default_factory=dict)
    files: list[tuple[Path, str]] = field(default_factory=list)
    """File on this machine, and its absolute path in the container."""

    def archive(self) -> bytes:
        """Return the files as a tar archive, paths from the root."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for source, target in self.files:
                tar.add(source, arcname=target.lstrip("/"), recursive=False, filter=_nobodys)
        return packed.getvalue()


def layout_of(environment: Path) -> Layout:
    """Read `environment/Dockerfile`; without one the folder's files are those of the working folder.

    Raises:
        DataError: it needs an image built, or services: an instruction other than FROM, WORKDIR, COPY, ADD of local files, ENV,
            USER, LABEL, EXPOSE, CMD and ENTRYPOINT, or a compose file.
    """
    found = Layout()
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (environment / name).exists():
            raise DataError(f"{environment / name}: services need Docker; wanted a box that has it")
    dockerfile = environment / "Dockerfile"
    if not dockerfile.exists():
        if environment.is_dir():
            _copy(found, environment, environment, found.workdir)
        return found
    for number, line in enumerate(_lines(dockerfile), start=1):
        word, _, rest = line.partition(" ")
        where, rest = f"{dockerfile}: instruction {number}", rest.strip()
        match word.upper():
            case "FROM" | "USER" | "LABEL" | "EXPOSE" | "CMD" | "ENTRYPOINT":
                pass
            case "WORKDIR":
                found.workdir = posixpath.join(found.workdir, rest)
            case "ENV":
                found.env |= _variables(rest, where)
            case "COPY" | "ADD":
                _add(found, environment, rest, where)
            case _:
                raise DataError(
                    f"{where}: {line[:80]!r} needs an image built; the box subprocess knows FROM, WORKDIR, COPY and ENV: "
                    "choose a box that has Docker (box = module:factory)"
                )
    return found


def _lines(dockerfile: Path) -> list[str]:
    """Return the instructions, a line each, without comments."""
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def _variables(rest: str, where: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:  # ENV NAME value
        return {words[0]: " ".join(words[1:])}
    if not words or not all("=" in word for word in words):
        raise DataError(f"{where}: ENV {rest[:80]!r}; wanted NAME=VALUE")
    return dict(word.split("=", 1) for word in words)


def _add(layout: Layout, environment: Path, rest: str, where: str) -> None:
    """Take the files of a COPY."""
    words = shlex.split(rest)
    if len(words) < 2 or any(word.startswith("--") or "://" in word for word in words):
        raise DataError(f"{where}: COPY {rest[:80]!r}; wanted files of the folder environment/, and where to")
    *sources, target = words
    for source in sources:
        path = (environment / source).resolve()
        if not path.exists() or not path.is_relative_to(environment.resolve()):
            raise DataError(f"{where}: {source}: is no file of {environment}")
        place = posixpath.join(layout.workdir, target)
        if path.is_dir():
            _copy(layout, path, environment, place)
        else:
            inside = target.endswith("/") or target in (".", "..") or len(sources) > 1
            layout.files.append(
                (path, posixpath.normpath(posixpath.join(place, path.name) if inside else place))
            )


def _copy(layout: Layout, folder: Path, environment: Path, target: str) -> None:
    """Take all files of a folder, but for what builds the container."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != environment / "Dockerfile":
            place = posixpath.join(target, path.relative_to(folder).as_posix())
            layout.files.append((path, posixpath.normpath(place)))


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = 0
    return member
