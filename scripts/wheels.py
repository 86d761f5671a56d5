"""Archives of wheels for machines without a network: ours, and what they need that such a machine lacks."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_MIB = 64
#: What a machine with torch and transformers has: them, and the largest of what they require.
THERE = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "regex",
    "pyyaml",
    "tqdm",
    "hf-xet",
    "numpy",
    "triton",
    "sympy",
    "mpmath",
)
OURS = ("slime-core", "slime-models", "slime-megatron", "slime-torch", "slime-algos", "slime-gym", "slime-rm", "slime-bench",
        "slime-simulator", "slime-kernels", "slime-example-family")  # fmt: skip
BROUGHT = (*OURS, "pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


def closure(names: Iterable[str]) -> dict[str, str]:
    """Return the version here of each distribution that these need, themselves included."""
    from importlib.metadata import distribution

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, str] = {}
    todo: list[tuple[str, tuple[str, ...]]] = [(name, ()) for name in names]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while todo:
        name, extras = todo.pop()
        if (canonicalize_name(name), extras) in seen or canonicalize_name(name) in THERE:
            continue
        seen.add((canonicalize_name(name), extras))
        found[canonicalize_name(name)] = distribution(name).version
        for text in distribution(name).requires or ():
            one = Requirement(text)
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                todo.append((one.name, tuple(sorted(one.extras))))
    return found


def bundle(file: Path) -> int:
    """Write an archive of wheels: ours, built here, and those of the versions here that another machine lacks. Needs uv and a network."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["uv", "build", "--all-packages", "--wheel", "--quiet", "--out-dir", f"{folder}/built"],
            cwd=ROOT,
            check=True,
        )
        wheels = Path(folder) / "wheels"
        wheels.mkdir()
        for name in OURS:
            shutil.copy2(next((Path(folder) / "built").glob(f"{name.replace('-', '_')}-*.whl")), wheels)
        others = [f"{name}=={version}" for name, version in closure(BROUGHT).items() if name not in OURS]
        pip = [
            "uv",
            "run",
            "--no-project",
            "--with",
            "pip",
            "--python",
            sys.executable,
            "python",
            "-m",
            "pip",
            "wheel",
            "--quiet",
        ]
        subprocess.run([*pip, "--no-deps", "--wheel-dir", wheels, *others], check=True)
        with tarfile.open(file, "w") as archive:
            for wheel in sorted(wheels.iterdir()):
                archive.add(wheel, wheel.name)
    print(f"{file}: {len(others) + len(OURS)} wheels, {file.stat().st_size / 2**20:.1f} MiB")
    return check_size(file)


def check_size(file: Path) -> int:
    """Return 1, and say so, if an archive is larger than a machine takes; else 0."""
    size = file.stat().st_size / 2**20
    if size > LIMIT_MIB:
        print(
            f"gpu_proof: {file} has {size:.1f} MiB; wanted at most {LIMIT_MIB}: leave packages out of BROUGHT",
            file=sys.stderr,
        )
    return int(size > LIMIT_MIB)


def install(file: Path) -> str:
    """Unpack the wheels of an archive beside it, asking nobody; return the folder for PYTHONPATH."""
    target = file.resolve().with_suffix(".site")
    if not target.exists() or target.stat().st_mtime < file.stat().st_mtime:
        shutil.rmtree(target, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(file) as archive:
                archive.extractall(folder, filter="data")
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-index",
                "--no-deps",
                "--no-compile",
                "--target",
                target,
            ]
            subprocess.run([*pip, *sorted(Path(folder).glob("*.whl"))], check=True)
    return str(target)
