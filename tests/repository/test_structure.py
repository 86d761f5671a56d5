"""The structure of the packages: no circle of imports, folders of about a dozen modules, one meaning a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest

PACKAGES = (
    *("slime_core", "slime_megatron", "slime_sglang", "slime_models", "slime_rm"),
    *(
        "slime_algos",
        "slime_bench",
        "slime_gym",
        "slime_ray",
        "slime_simulator",
        "slime_torch",
        "slime_trackers",
    ),
)


def modules(root, package):
    """Return module -> file, of a package."""
    (source,) = [*root.glob(f"packages/*/src/{package}"), *root.glob(f"plugins/*/src/{package}")]
    found = {}
    for path in source.rglob("*.py"):
        parts = path.relative_to(source.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(files):
    """Return module -> the package's own modules that it imports anywhere: under TYPE_CHECKING and in functions, too."""
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        wanted: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: a relative import"
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                wanted |= {one if one in files else str(node.module) for one in names}
        graph[name] = {one for one in wanted if one in files and one != name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield the sets of nodes that reach one another."""

    def reached(start):
        seen, waiting = set(), [start]
        while waiting:
            for node in graph[waiting.pop()] - seen:
                seen.add(node)
                waiting.append(node)
        return seen

    reach = {node: reached(node) for node in graph}
    left = {node for node in graph if node in reach[node]}
    while left:
        node = min(left)
        circle = {other for other in reach[node] if node in reach[other]}
        left -= circle
        yield sorted(circle)


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert list(circles(graph)) == [["b", "c"]]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_one_another(root, package):
    assert list(circles(imports(modules(root, package)))) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folders_import_one_another(root, package):
    graph: dict[str, set[str]] = defaultdict(set)
    for name, wanted in imports(modules(root, package)).items():
        folder, *others = [".".join(one.split(".")[:2]) for one in (name, *sorted(wanted))]
        graph[folder] |= {other for other in others if other not in (folder, package)}
    for folder in {other for wanted in graph.values() for other in wanted}:
        graph.setdefault(folder, set())
    assert list(circles(graph)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_hold_about_a_dozen_modules(root, package):
    counts: dict[str, int] = defaultdict(int)
    for path in modules(root, package).values():
        counts[str(path.parent)] += path.name != "__init__.py"
    crowded = {folder: count for folder, count in counts.items() if count > 18}
    assert crowded == {}


def public_definitions(root, *kinds):
    """Yield (node, place) of the public definitions at the top of each module of `packages` and `plugins`."""
    for path in sorted([*root.glob("packages/*/src/**/*.py"), *root.glob("plugins/*/src/**/*.py")]):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, kinds) and not node.name.startswith("_"):
                yield node, f"{path.relative_to(root)}:{node.lineno}"


def test_public_class_names_are_unique(root):
    places = defaultdict(list)
    for node, place in public_definitions(root, ast.ClassDef):
        places[node.name].append(place)
    assert len(places) > 300
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_public_functions_have_bodies_of_their_own(root):
    places = defaultdict(list)
    for node, place in public_definitions(root, ast.FunctionDef, ast.AsyncFunctionDef):
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if body:  # a hook's specification has none
            does = map(ast.dump, [*node.decorator_list, node.args, *body])
            places[tuple(does)].append(f"{node.name} at {place}")
    assert len(places) > 300
    assert [found for found in places.values() if len(found) > 1] == []
