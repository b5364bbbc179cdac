"""The small faults that `tools.mutation` puts into a module: changed operators, comparisons,
constants and conditions."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ludic"


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of one node: `number` counts the nodes that can be changed in the file. `text` is
    the line it is in, white space folded."""

    path: str
    number: int
    line: int
    what: str
    text: str


_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}


class Mutator(ast.NodeTransformer):
    """Walks a module in order, counts what could be changed, and changes the chosen one."""

    def __init__(self, chosen: int = -1) -> None:
        self.chosen, self.found = chosen, list[tuple[int, str]]()

    def _is_chosen(self, node: Any, what: str) -> bool:
        self.found.append((node.lineno, what))
        return len(self.found) - 1 == self.chosen

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node  # a message's wording is not behaviour

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]
        defaults = [d if d is None else self.visit(d) for d in node.args.kw_defaults]
        node.args.kw_defaults = defaults
        node.args.defaults = [self.visit(d) for d in node.args.defaults]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(statement) for statement in node.body]  # not its decorators
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self.visit_FunctionDef(node)  # type: ignore[arg-type]

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        swap = _COMPARE[type(node.ops[0])]
        if self._is_chosen(node, f"{type(node.ops[0]).__name__} -> {swap.__name__}"):
            node.ops = [swap(), *node.ops[1:]]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        swap = _ARITHMETIC.get(type(node.op))
        if swap and self._is_chosen(node, f"{type(node.op).__name__} -> {swap.__name__}"):
            node.op = swap()
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        swap = _ARITHMETIC.get(type(node.op))
        if swap and self._is_chosen(node, f"{type(node.op).__name__}= -> {swap.__name__}="):
            node.op = swap()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen(node, "and <-> or"):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not | ast.USub) and self._is_chosen(node, "sign or not gone"):
            return node.operand
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return node
        self.generic_visit(node)
        if not isinstance(node.test, ast.Compare | ast.UnaryOp) and self._is_chosen(
            node, "condition turned round"
        ):
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen(node, "branches exchanged"):
            node.body, node.orelse = node.orelse, node.body
        return node

    def visit_Continue(self, node: ast.Continue) -> ast.AST:
        return ast.Break() if self._is_chosen(node, "continue -> break") else node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._is_chosen(node, f"{node.value} -> {not node.value}"):
                return ast.Constant(not node.value)
        elif isinstance(node.value, int | float) and self._is_chosen(
            node, f"{node.value} -> {node.value + 1}"
        ):
            return ast.Constant(node.value + 1)
        return node


def mutated(source: str, number: int) -> str:
    """A module's source with its fault of that number in it."""
    return ast.unparse(ast.fix_missing_locations(Mutator(number).visit(ast.parse(source))))


def faults(path: str) -> list[Fault]:
    """Every fault that can be put into a file."""
    source = (SOURCE / path).read_text(encoding="utf-8")
    lines, mutator = source.splitlines(), Mutator()
    mutator.visit(ast.parse(source))
    return [
        Fault(path, n, line, what, " ".join(lines[line - 1].split()))
        for n, (line, what) in enumerate(mutator.found)
    ]
