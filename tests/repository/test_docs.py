"""Documentation says what the code does."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from slime_core.checks.settings import check_settings
from slime_core.config.load import load_settings
from slime_core.config.parsing.schema import build_schema
from slime_core.plugins.registry import Registry
from slime_core.run.build import make_build


def test_generated_pages_are_fresh(root):
    spec = importlib.util.spec_from_file_location("generate_docs", root / "scripts/generate_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.pages().items():
        assert path.read_text() == text, f"{path} is stale; run scripts/generate_docs.py"


def test_every_flag_that_chooses_a_plugin_is_one():
    known = {flag.spelled for flag in build_schema(Registry()).flags.values()}
    assert {flag for group in Registry().groups.values() for flag in group.flags} <= known


def test_plugin_guide_quotes_the_example_word_for_word(root):
    guide = (root / "docs/write-a-plugin.md").read_text()
    example = root / "plugins/slime-example-reward"
    blocks = re.findall(r"```[a-z]*\n(.*?)```", guide, re.S)
    for file in ("src/slime_example_reward/__init__.py", "pyproject.toml"):
        assert (example / file).read_text() in blocks, file
    lines = (example / "src/slime_example_reward/__init__.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 9


def test_loop_guide_quotes_the_example_word_for_word(root):
    guide = (root / "docs/custom-loop.md").read_text()
    assert (root / "docs/examples/custom_loop.py").read_text() in re.findall(
        r"```python\n(.*?)```", guide, re.S
    )


def test_loop_guides_reference_is_found_from_the_repository(slime, root):
    (reference,) = re.findall(r"--loop (\S+:\w+)\n", (root / "docs/examples/custom_loop.py").read_text())
    assert slime("plugins", "show", "loops", reference, cwd=root).returncode == 0


def test_a_reward_models_server_without_a_gpu_is_started_as_the_engine_starts_its_own(root):
    from slime_sglang.server.command import server_command, server_environment

    blocks = re.findall(r"```[a-z]*\n(.*?)```", (root / "packages/slime-rm/README.md").read_text(), re.S)
    (said,) = (block.replace("\\\n", " ").split() for block in blocks if "SGLANG_PLATFORM" in block)
    variables = [f"{name}={value}" for name, value in server_environment(device="cpu").items()]
    command = server_command(
        "FOLDER", port=30000, dtype="float32", device="cpu", arguments=["--is-embedding"]
    )
    own_host = command.index("--host")
    del command[own_host : own_host + 2]
    assert sorted(said) == sorted([*variables, "python", *command[1:]])


def pages(root: Path) -> list[Path]:
    return [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("p*/*/README.md")]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of a page may end in: its words in lower case, joined by hyphens, without other signs."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_guides_exist(root):
    for page in pages(root):
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), f"{page}: {target}"
            assert not anchor or anchor in anchors(linked), f"{page}: {target}"


def top_level(root: Path, module: str) -> set[str]:
    """Names that a module defines or imports, and modules of a package, by its text: some modules import what wants a GPU's driver."""
    place = module.replace(".", "/")
    (file,) = [*root.glob(f"p*/*/src/{place}.py"), *root.glob(f"p*/*/src/{place}/__init__.py")]
    names = {inner.stem for inner in file.parent.iterdir()} if file.name == "__init__.py" else set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_code_of_the_guides_imports_what_there_is(root):
    imported = {
        (node.module, alias.name, page)
        for page in pages(root)
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slime_")
        for alias in node.names
    }
    assert len(imported) > 30
    for module, name, page in imported:
        assert name in top_level(root, module), f"{page}: {module}.{name}"


def test_program_of_the_loop_guide_runs(root, letters, tmp_path):
    block = re.findall(
        r"```python\n(import asyncio.*?)```", (root / "docs/custom-loop.md").read_text(), re.S
    )[0]
    program = block.replace("recipes/quickstart.toml", str(letters))
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=550
    )
    assert result.returncode == 0, result.stderr
    assert 0 <= float(result.stdout.strip()) <= 1


def test_files_that_architecture_names_exist(root):
    text = (root / "ARCHITECTURE.md").read_text()
    places = [root, *root.glob("packages/*/src/*"), *root.glob("packages/*/src"), *root.glob("plugins/*/src")]
    for name in set(re.findall(r"\b([\w/]+\.py)\b", text)):
        assert any((place / name).exists() for place in places), name


def test_runs_of_the_pages_are_what_their_models_allow(root, monkeypatch):
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(root)
    registry, found = Registry.from_environment(), set()
    for page in [root / "README.md", *root.glob("p*/*/README.md"), *(root / "docs").glob("*.md")]:
        blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.S | re.M))
        found |= set(re.findall(r"slime train (recipes/\S+(?: \S+)*)", blocks))  # two spaces begin a remark
    assert len(found) >= 8
    for command in sorted(found):
        recipe, *flags = shlex.split(command)
        settings = load_settings([recipe], flags, registry=registry)
        assert check_settings(settings, registry) == [], command
        make_build(settings, registry)  # raises where the model cannot be shared out so


@pytest.mark.parametrize("words", [["--help"], ["plugins"]])
def test_command_imports_nothing_heavy(words):
    code = (
        f"import sys; sys.argv = ['slime', *{words!r}]\n"
        "from slime_core.cli.main import run\n"
        "assert run(sys.argv[1:]) == 0\n"
        "heavy = {'torch', 'ray', 'megatron', 'sglang', 'transformers', 'numpy', 'sympy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_help_imports_nothing_heavy():
    """Neither what computes nor what checks settings: both take longer than the answer."""
    code = "import sys; from slime_core.cli.main import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "usage: slime" in found.stdout
    tops = {name.partition(".")[0] for name in found.stderr.split()}
    assert tops & {"numpy", "pydantic", "rich", "torch", "transformers", "ray", "megatron", "sglang"} == set()


def test_every_python_file_of_a_package_is_small(root: Path):
    for file in root.glob("p*/*/src/**/*.py"):
        assert len(file.read_text().splitlines()) <= 400, f"{file} has grown to hold two ideas; split it"


def test_places_to_change_exist(root):
    """Each file in the last column is in a folder of its row, or stands with its whole path."""
    page = (root / "docs/where-to-change.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 20
    for task, folders, files in rows:
        places = [root / folder for folder in re.findall(r"`([\w/.-]+)`", folders)]
        assert places and all(place.is_dir() for place in places), task
        names = re.findall(r"`([\w/.-]+\.(?:py|md))`", files)
        for name in names:
            assert (root / name).is_file() or any((place / name).is_file() for place in places), (task, name)
        for place in places:
            assert any((place / name).is_file() for name in names), (task, place)


def test_modules_of_the_glossary_exist(root):
    entries = [line for line in (root / "docs/glossary.md").read_text().splitlines() if line.startswith("- ")]
    assert len(entries) >= 40
    sources = [*root.glob("packages/*/src"), *root.glob("plugins/*/src")]
    for entry in entries:
        modules = re.findall(r"`(slime_\w+/[\w/]+\.py)`", entry)
        assert modules, f"no module: {entry}"
        for module in modules:
            assert any((source / module).is_file() for source in sources), module
