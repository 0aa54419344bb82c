"""The mutants of a Python file, found in its syntax tree and made as edits of its text.

Not touched: docstrings, log calls, type hints, decorators, `__all__`, f-strings, and what an error is raised with.
"""

import ast
from collections.abc import Iterator, Sequence

from scripts.mutation.mutant import Edit, Mutant, numbered, squeezed

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
}
LOGS = {"log", "logger", "logging", "warnings"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
UNTOUCHED_FIELDS = {"annotation", "returns", "decorator_list", "type_params", "bases"}
PLAIN_TESTS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)
"""Conditions that have mutants of their own, and need not be negated as a whole."""


def mutants(path: str, source: bytes) -> list[Mutant]:
    """List every mutant of a file, in the order of the text."""
    found = _Finder(path, source).found()
    return numbered(sorted(found, key=lambda mutant: (mutant.edit.start, mutant.edit.end, mutant.edit.text)))


def block_of(body: Sequence[ast.AST]) -> str:
    """Name a block by where its first statement begins."""
    first = body[0]
    assert isinstance(first, ast.stmt)
    return f"{first.lineno}:{first.col_offset}"


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements directly below a node."""
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
            yield body


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._found: list[Mutant] = []
        self._where: list[str] = []
        self._block = ""
        self._rebound: set[str] = set()

    def found(self) -> list[Mutant]:
        self._children(ast.parse(self._source))
        return self._found

    def _visit(self, node: ast.AST) -> None:
        if self._untouched(node):
            return
        if isinstance(node, ast.stmt):
            self._statement(node)
        elif isinstance(node, ast.expr):
            self._expression(node)
        if not isinstance(node, ast.Raise):
            self._children(node)

    def _children(self, node: ast.AST) -> None:
        named = isinstance(node, (*FUNCTIONS, ast.ClassDef))
        rebound, block = self._rebound, self._block
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            self._where.append(node.name)
        if isinstance(node, FUNCTIONS):
            self._rebound = _rebound(node)
        for field, value in ast.iter_fields(node):
            if field in UNTOUCHED_FIELDS or (isinstance(node, ast.ClassDef) and field == "keywords"):
                continue
            nodes = [value] if isinstance(value, ast.AST) else value if isinstance(value, list) else []
            inside = self._block or isinstance(node, FUNCTIONS)
            if inside and nodes and isinstance(nodes[0], ast.stmt):
                self._block = f"{self._path}:{block_of(nodes)}"
            for child in nodes:
                if isinstance(child, ast.AST):
                    self._visit(child)
            self._block = block
        self._rebound, self._block = rebound, block
        if named:
            self._where.pop()

    def _untouched(self, node: ast.AST) -> bool:
        match node:
            case ast.JoinedStr():
                return True
            case ast.Expr(value=ast.Constant()):
                return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in LOGS:
                return True
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))) if name in LOGS:
                return True
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=name))) if name in LOGS or name == "_log":
                return True
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                return True
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                return True
        return False

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Await(value=ast.Call() as call)):
                self._replace(node, "pass")
                self._replace(node, self._text(call))
            case ast.Expr(value=ast.Call()):
                self._replace(node, "pass")
            case ast.AugAssign() | ast.Continue() | ast.Break() | ast.Raise():
                self._replace(node, "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if "__init__" not in self._where:
                self._replace(node, "pass")
            case ast.Assign(targets=[ast.Name(id=name)]) if name in self._rebound:
                self._replace(node, "pass")
            case ast.Return(value=None):
                self._replace(node, "pass")
            case ast.Return(value=ast.Constant(value=None | True | False)):
                pass
            case ast.Return():
                self._replace(node, "return None")
            case ast.If(test=test) | ast.While(test=test) if not isinstance(test, PLAIN_TESTS):
                self._replace(test, f"not ({self._text(test)})")

    def _expression(self, node: ast.expr) -> None:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                self._operator(node, left, right, COMPARISONS[type(operator)])
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
                if not any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (left, right)):
                    self._operator(node, left, right, ARITHMETIC[type(operator)])
            case ast.BoolOp(op=operator, values=values):
                other = " or " if isinstance(operator, ast.And) else " and "
                self._replace(node, f"({other.join(f'({self._text(value)})' for value in values)})")
                same = " and " if isinstance(operator, ast.And) else " or "
                for n in range(len(values)):
                    rest = [f"({self._text(value)})" for m, value in enumerate(values) if m != n]
                    self._replace(node, f"({same.join(rest)})")
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                self._replace(node, self._text(operand))
            case ast.IfExp(test=test) if not isinstance(test, PLAIN_TESTS):
                self._replace(test, f"(not ({self._text(test)}))")
            case ast.Constant(value=bool() as value):
                self._replace(node, str(not value))
            case ast.Constant(value=int() | float() as number):
                self._replace(node, str(number + 1) if number in (0, 1) else "0")

    def _operator(self, node: ast.expr, left: ast.expr, right: ast.expr, change: tuple[str, str]) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        between = self._source[start:end].decode()
        before, found, after = between.partition(change[0])
        if found:
            self._add(node, Edit(start, end, f"{before}{change[1]}{after}"))

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        start, end = self._span(node)
        self._add(node, Edit(start, end, text))

    def _add(self, node: ast.expr | ast.stmt, edit: Edit) -> None:
        start, end = self._span(node)
        old = self._source[start:end].decode()
        after = self._source[: edit.start] + edit.text.encode() + self._source[edit.end :]
        new = after[start : end + len(after) - len(self._source)].decode()
        shown = f"`{squeezed(old)}` removed" if new == "pass" else f"`{squeezed(old)}` → `{squeezed(new)}`"
        if isinstance(node, ast.Constant):
            shown = f"{shown} in `{squeezed(self._line(node.lineno))}`"
        self._found.append(
            Mutant(self._path, ".".join(self._where) or "(module)", shown, node.lineno, self._block, edit)
        )

    def _line(self, number: int) -> str:
        return self._source[self._starts[number - 1] : self._starts[number]].decode()

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _rebound(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names that a function binds more than once: without one of the assignments the name is still bound."""
    names = [argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)]
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
    return {name for name in names if names.count(name) > 1}
