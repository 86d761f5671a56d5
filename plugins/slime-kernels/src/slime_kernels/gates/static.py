"""The static gate: a candidate's source is read, and nothing of it runs.

It goes by what is allowed (`allowed`), not by what is known to cheat, and by the syntax tree, not by substrings. It is strict as what it
lets pass runs in the same process as what watches it.
"""

from __future__ import annotations

import ast

from torch import Tensor

from slime_kernels.gates.allowed import (
    ATTRIBUTES_REFUSED,
    BASES,
    BUILTINS,
    CLASSES,
    LANGUAGE,
    LANGUAGE_MODULES,
    LANGUAGE_TYPES,
    LIBDEVICE,
    METHODS,
    MODULES,
    NOT_IN_LANGUAGE,
    REGISTERING,
    TORCH,
    TORCH_CUDA,
    TORCH_IN_CONSTRUCTOR,
    TORCH_NN,
    TORCH_REFUSED,
    TRITON,
    VALUELESS,
)
from slime_kernels.gates.findings import Finding, line_of, path_of
from slime_kernels.gates.inductor import plain
from slime_kernels.gates.names import Names, read_names
from slime_kernels.gates.repetitions import without_repetitions
from slime_kernels.gates.scopes import (
    RELIED_ON,
    bound_in,
    imported_in,
    is_plain_format,
    methods_with_owner,
    owner_of,
    parameters,
    plain_uses,
)

ENTRY = "ModelNew"
_MOST_CHARACTERS = 100_000
_MOST_DEPTH = 100


def parse(source: str) -> ast.Module | Finding:
    """Return a candidate's syntax tree, `without_repetitions`, or why it has none."""
    if len(source) > _MOST_CHARACTERS:
        return Finding("syntax", 0, f"{len(source)} characters; wanted at most {_MOST_CHARACTERS}")
    try:
        tree = ast.parse(source)
        if _depth(tree) > _MOST_DEPTH:
            return Finding("syntax", 0, f"expressions nested more than {_MOST_DEPTH} deep")
        return without_repetitions(plain(tree))
    except SyntaxError as error:
        return Finding("syntax", error.lineno or 0, error.msg)
    except (ValueError, RecursionError, MemoryError) as error:
        return Finding("syntax", 0, str(error) or type(error).__name__)


def check(tree: ast.Module) -> list[Finding]:
    """Return what is wrong with a candidate, in the order of its lines; nothing where it may run."""
    names = read_names(tree)
    findings = [*names.findings, *_structure(tree, names)]
    _Visitor(names, findings).visit(tree)
    return sorted(findings, key=lambda one: one.line)


def _depth(tree: ast.AST) -> int:
    depth, level = 0, [tree]
    while level and depth <= _MOST_DEPTH:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    return depth


def _structure(tree: ast.Module, names: Names) -> list[Finding]:
    """Check that there is an entry, a kernel that loads and stores, and a launch of it."""
    found = []
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    entry = classes.get(ENTRY)
    if entry is None:
        found.append(Finding("structure", 0, f"has no class {ENTRY}"))
    elif not any(isinstance(node, ast.FunctionDef) and node.name == "forward" for node in entry.body):
        found.append(Finding("structure", entry.lineno, f"{ENTRY} has no forward"))
    launched = {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }
    if not names.kernels:
        found.append(Finding("structure", 0, "has no function under @triton.jit"))
    elif not launched & set(names.kernels):
        found.append(Finding("structure", 0, "launches none of its kernels: kernel[grid](...)"))
    return found


class _Visitor(ast.NodeVisitor):
    """Looks at every node once; knows in which function it is."""

    def __init__(self, names: Names, findings: list[Finding]) -> None:
        self._names, self._findings = names, findings
        self._functions: list[str] = []
        self._in_kernel = False
        self._locals: set[str] = set()
        """Names that a function around has given a meaning of their own."""
        self._own: set[str] = set()
        """Names that the candidate's classes give what they have."""
        self._owners: set[str] = set()
        """Parameters of functions around that are objects of the candidate's own: `self`, `cls`, `ctx`."""
        self._around: ast.ClassDef | None = None
        """The class in whose body, and in no function of it, this is."""
        self._classes: dict[str, bool] = {}
        """The candidate's classes, and whether each is derived from autograd's Function."""
        self._owned: set[str] = set()
        """Names of methods that write to their own object."""
        self._plain: set[int] = set()
        """Nodes that name a class and hand it to nobody."""

    def _find(self, rule: str, node: ast.AST, text: str) -> None:
        self._findings.append(Finding(rule, line_of(node), text))

    def visit_Module(self, node: ast.Module) -> None:
        self._own = _own_names(node)
        self._owned, self._plain = methods_with_owner(node, self._names), plain_uses(node, self._names)
        for one in ast.walk(node):
            if isinstance(one, ast.ClassDef):
                bases = [self._names.path(base) for base in one.bases]
                self._classes[one.name] = "torch.autograd.Function" in bases
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        self._find("forbidden", node, "has a match statement: its patterns read attributes")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._binds(node, node.name)
        for base in node.bases:
            path = path_of(base)
            if path not in BASES and self._names.path(base) not in BASES:
                self._find("forbidden", node, f"class {node.name} is derived from {path or 'an expression'}")
        if node.keywords:
            self._find("forbidden", node, f"class {node.name} has a metaclass")
        for one in node.decorator_list:
            if self._names.path(one.func if isinstance(one, ast.Call) else one) != "dataclasses.dataclass":
                self._find("forbidden", node, f"hands the class {node.name} to a decorator")
        was = self._around, self._locals
        # What the body binds as well it reads, before that, from the module and not from a function around.
        self._around, self._locals = node, self._locals - bound_in(node) - imported_in(node)
        self.generic_visit(node)
        self._around, self._locals = was

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if _is_special(node.name) and node.name not in METHODS:
            self._find("forbidden", node, f"defines {node.name}")
        self._binds(node, node.name)
        for part in (*node.decorator_list, node.args, *([node.returns] if node.returns else [])):
            self.visit(part)
        was = self._in_kernel, self._locals, self._owners, self._around
        self._in_kernel = self._in_kernel or node.name in self._names.kernels
        self._locals = (self._locals | bound_in(node)) - imported_in(node)
        owner = owner_of(node, self._around, self._names)
        self._owners = self._owners - parameters(node) | ({owner} if owner else set())
        self._around = None
        self._functions.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()
        self._in_kernel, self._locals, self._owners, self._around = was

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        outer, self._owners = self._owners, self._owners - parameters(node)
        self.visit(node.body)
        self._owners = outer

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._binds(node, node.name)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self._imports(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._imports(node)

    def _imports(self, node: ast.Import | ast.ImportFrom) -> None:
        """Check an import's place: in the body of a class it would be an attribute, and no name that is known for a module."""
        if self._around is not None:
            self._find("forbidden", node, f"imports in the body of the class {self._around.name}")
        self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> None:
        if (node.asname or node.name.partition(".")[0]) in RELIED_ON:
            self._binds(node, str(node.asname or node.name))

    def _binds(self, node: ast.AST, name: str) -> None:
        """Check a name that a statement gives a meaning; those of assignments are looked at in `visit_Name`."""
        if name in self._names.modules and not isinstance(node, ast.alias):
            self._find("forbidden", node, f"takes the name of the import {name}")
        if name in RELIED_ON:
            self._find("forbidden", node, f"gives {name} another meaning")

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._find("forbidden", node, "is asynchronous")

    def visit_Global(self, node: ast.Global) -> None:
        self._find("forbidden", node, "keeps state in a global variable")

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self._find("forbidden", node, "keeps state in a variable of another function")

    def visit_Delete(self, node: ast.Delete) -> None:
        if any(isinstance(target, ast.Attribute) for target in node.targets):
            self._find("forbidden", node, "deletes an attribute")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring may say what it likes
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and "__" in node.value:
            self._find("forbidden", node, "has text with the name of a special attribute")

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in BUILTINS or (_is_special(node.id) and node.id != "__name__"):
            self._find("forbidden", node, f"uses {node.id}")
        if node.id in RELIED_ON and not isinstance(node.ctx, ast.Load):
            self._binds(node, node.id)
        self._class_as_value(node)
        path = None if node.id in self._locals else self._names.modules.get(node.id)
        if isinstance(node.ctx, ast.Store | ast.Del) and path is not None:
            self._find("forbidden", node, f"gives {node.id} another meaning")
        elif path in VALUELESS:
            self._find("forbidden", node, f"uses the module {node.id} as a value")
        elif path is not None:
            self._path(node, path)

    def _class_as_value(self, node: ast.Name) -> None:
        """Refuse what would let a method get another object than its own: its class, or its function where the class is made."""
        methods = [] if self._around is None else self._around.body
        if any(isinstance(one, ast.FunctionDef) and one.name == node.id for one in methods):
            self._find("forbidden", node, f"uses the method {node.id} as a value")
        if node.id in self._classes and node.id not in self._locals and id(node) not in self._plain:
            self._find("forbidden", node, f"uses the class {node.id} as a value")

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and self._classes.get(node.func.id):
            self._find("forbidden", node, f"makes an object of {node.func.id}, which has `apply`")
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        if node.arg in RELIED_ON:
            self._binds(node, node.arg)
        if node.arg in self._names.modules:
            self._find("forbidden", node, f"gives {node.arg} another meaning")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _is_special(node.attr) and not _calls_super(node):
            self._find("forbidden", node, f"uses the attribute {node.attr}")
        elif node.attr.startswith("_") and not self._is_own(node) and not _calls_super(node):
            self._find("forbidden", node, f"uses the private attribute {node.attr}")
        if not isinstance(node.ctx, ast.Load) and path_of(node.value) not in self._owners - {"cls"}:
            self._find("forbidden", node, f"sets the attribute {node.attr} of what is not self")
        if node.attr in self._owned and path_of(node.value) in {*self._classes, "ctx"}:
            self._find("forbidden", node, f"uses the method {node.attr} of a class, and not of an object")
        path = self._names.path(node)
        if path is None or str(path_of(node)).partition(".")[0] in self._locals:
            if _is_refused(node.attr) and not self._is_own(node) and not is_plain_format(node):
                self._find("forbidden", node, f"uses {node.attr}")
            if node.attr != "setter" or not isinstance(node.value, ast.Name):
                self.visit(node.value)
        else:
            self._path(node, path)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.MatMult) and not self._in_kernel and not self._in_constructor:
            self._find("delegation", node, "multiplies matrices by @ outside of a kernel")
        self.generic_visit(node)

    def _is_own(self, node: ast.Attribute) -> bool:
        """Return whether this is an attribute of `self` that the candidate has made, and that tensors have not: `self` may be one."""
        is_self = path_of(node.value) in self._owners - {"ctx"}
        return is_self and node.attr in self._own and not hasattr(Tensor, node.attr)

    @property
    def _in_constructor(self) -> bool:
        return "__init__" in self._functions

    def _path(self, node: ast.AST, path: str) -> None:
        """Check a dotted path into a module."""
        root, _, rest = path.partition(".")
        first, _, more = rest.partition(".")
        if path in VALUELESS:
            self._find("forbidden", node, f"uses the module {path} as a value")
        elif any(part.startswith("_") for part in rest.split(".")):
            self._find("forbidden", node, f"uses {path}")
        elif any(path.startswith(f"{one}.") for one in CLASSES):
            self._find("forbidden", node, f"uses {path}, which belongs to a class")
        elif path in CLASSES and id(node) not in self._plain:
            self._find("forbidden", node, f"uses the class {path} as a value")
        elif root == "torch":
            self._torch(node, path, first, more)
        elif root == "triton" and first == "language":
            self._language(node, path)
        elif root == "triton":
            if first not in TRITON or more:
                self._find("forbidden", node, f"uses {path}")
        else:
            module, _, name = path.rpartition(".")
            known = MODULES.get(module, frozenset())
            if module not in MODULES or (known is not None and name not in known):
                self._find("forbidden", node, f"uses {path}")

    def _language(self, node: ast.AST, path: str) -> None:
        """Check a path into triton.language: a name of it, an attribute of a type, or a function of one of its modules of functions."""
        module, _, name = path.rpartition(".")
        if module in LIBDEVICE or module in {f"triton.language.{one}" for one in LANGUAGE_TYPES}:
            if _is_refused(name):
                self._find("forbidden", node, f"uses {path}")
        elif module not in ("triton.language", *LANGUAGE_MODULES) or name in NOT_IN_LANGUAGE:
            self._find("forbidden", node, f"uses {path}")
        elif name not in LANGUAGE:
            self._find("name", node, f"uses {path}, which is no function or type that kernels may use")

    def _torch(self, node: ast.AST, path: str, first: str, more: str) -> None:
        if self._in_kernel and first not in ("float32",):
            self._find("delegation", node, f"uses {path} in a kernel")
        elif first == "cuda":
            if more not in TORCH_CUDA:
                self._find("forbidden", node, f"uses {path}")
        elif first == "autograd":
            if more != "Function":
                self._find("forbidden", node, f"uses {path}")
        elif first == "nn":
            if more not in TORCH_NN and not (self._in_constructor and _makes_weights(more)):
                self._find("delegation", node, f"computes by {path}")
        elif first not in (TORCH_IN_CONSTRUCTOR if self._in_constructor else TORCH) or (
            more and first != "Size"
        ):
            rule = "forbidden" if first in TORCH_REFUSED else "delegation"
            self._find(rule, node, f"uses {path}, which is not for allocating or reshaping")


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_refused(name: str) -> bool:
    """Return whether this is an attribute of any object that nothing may use."""
    return name in ATTRIBUTES_REFUSED or (name.startswith("register_") and name not in REGISTERING)


def _makes_weights(path: str) -> bool:
    """Return whether a path below torch.nn is a class of modules, or a function that fills weights: what constructors may use."""
    module, _, name = path.rpartition(".")
    if module == "init":
        return name.endswith("_") or name == "calculate_gain"
    return not module and name[0].isupper()


def _own_names(tree: ast.Module) -> set[str]:
    """Return the names of methods, and of what is assigned to `self` and to classes."""
    own: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            own |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            own |= {
                one.id
                for one in ast.walk(node)
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
            }
    return own


def _calls_super(node: ast.Attribute) -> bool:
    """Return whether this is `super().__init__`."""
    inner = node.value
    return (
        node.attr == "__init__"
        and isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Name)
        and inner.func.id == "super"
    )
