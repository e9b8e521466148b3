"""Parser of rule expressions: text in, checked tree out, or what is wrong and where.

Recursive descent, one method per level of precedence as in SQL. It is an allow-list by
construction: nothing produces a query, a cast, an aggregate or a function that is not listed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from whyidle_rules import evidence
from whyidle_rules.expression import FUNCTIONS, Expression, Kind, Node, column_kind

MAX_CHARS = 2_000  # the longest claim of our own has about 150
MAX_DEPTH = 32  # keeps a hostile file from exhausting the stack

_COMPARISONS = {
    "=": "=",
    "==": "=",
    "<>": "<>",
    "!=": "<>",
    "<": "<",
    "<=": "<=",
    ">": ">",
    ">=": ">=",
}
_CONSTANTS: dict[str, Kind] = {"true": "truth", "false": "truth", "null": "null"}
_KEYWORDS = frozenset(["and", "or", "not", "between", "in", "case", "when", "then", "else", "end"])
_REFUSED = {
    "select": "an expression cannot hold a query",
    "from": "an expression cannot hold a query",
    "over": "window functions are not allowed",
    "is": "IS is not allowed: list a column that must be known under `needs`, one that must be "
    "unknown under `lacks`",
    "coalesce": "COALESCE is not allowed: it would turn unknown into a number",
    "like": "LIKE is not allowed: compare with = or IN",
    "cast": "CAST is not allowed: all arithmetic is done in DOUBLE anyway",
}
_TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<comment>--|/\*)"
    r"|(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?![A-Za-z0-9_]))"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<param>\$[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<text>'(?:[^']|'')*')|(?P<sign><=|>=|<>|!=|==|[-+*/%=<>(),])"
)


class ExpressionError(Exception):
    """What is wrong in an expression, and at which character of it."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


def suggest(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean `...`?' for the closest known name, or ''."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def parse(text: str, params: Mapping[str, Kind], kind: Kind) -> Expression:
    """Parse an expression of the given kind; raises ExpressionError."""
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"an expression has at most {MAX_CHARS} characters", 0)
    root = _Parser(text, params).whole()
    if root.kind not in (kind, "null"):
        raise ExpressionError(f"this is a {root.kind}; a {kind} is needed", root.offset)
    return Expression(text=text, root=root)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    """A token; words are lower-cased in `text`."""

    type: str
    text: str
    offset: int


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"`{text[at : at + 12]}` has no meaning in an expression", at)
        kind = str(match.lastgroup)
        if kind == "comment":
            raise ExpressionError("comments belong into the YAML, not into the expression", at)
        if kind != "space":
            word = match.group().lower() if kind == "word" else match.group()
            found.append(_Token(type=kind, text=word, offset=at))
        at = match.end()
    return [*found, _Token(type="end", text="the end", offset=len(text))]


def _need(node: Node, kind: Kind) -> Node:
    if node.kind not in (kind, "null"):
        raise ExpressionError(f"this is a {node.kind}; a {kind} is needed", node.offset)
    return node


def _same(left: Node, right: Node) -> Kind:
    """Return the common kind of two nodes."""
    kinds = {left.kind, right.kind} - {"null"}
    if len(kinds) == 2:
        raise ExpressionError(f"a {left.kind} and a {right.kind} do not mix", right.offset)
    return kinds.pop() if kinds else "null"


class _Parser:
    def __init__(self, text: str, params: Mapping[str, Kind]) -> None:
        self._tokens = _tokens(text)
        self._params = params
        self._at = 0
        self._depth = 0

    def whole(self) -> Node:
        node = self._any()
        if self._next.type != "end":
            raise self._unexpected(f"`{self._next.text}` is not expected here")
        return node

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _accept(self, *texts: str) -> _Token | None:
        token = self._next
        if token.type in ("word", "sign") and token.text in texts:
            self._at += 1
            return token
        return None

    def _expect(self, text: str) -> None:
        if self._accept(text) is None:
            raise self._unexpected(f"`{text.upper()}` is missing here")

    def _unexpected(self, otherwise: str) -> ExpressionError:
        token = self._next
        why = _REFUSED.get(token.text) if token.type == "word" else None
        return ExpressionError(why or otherwise, token.offset)

    def _deeper(self, below: Callable[[], Node]) -> Node:
        if self._depth >= MAX_DEPTH:
            raise ExpressionError(f"nested more than {MAX_DEPTH} deep", self._next.offset)
        self._depth += 1
        node = below()
        self._depth -= 1
        return node

    def _any(self) -> Node:
        return self._deeper(lambda: self._logic("or", self._conjunction))

    def _conjunction(self) -> Node:
        return self._logic("and", self._negation)

    def _logic(self, word: str, below: Callable[[], Node]) -> Node:
        parts = [below()]
        while self._accept(word):
            parts.append(below())
        if len(parts) == 1:
            return parts[0]
        args = tuple(_need(part, "truth") for part in parts)
        return Node(op=word, kind="truth", offset=parts[0].offset, args=args)

    def _negation(self) -> Node:
        token = self._accept("not")
        if token is None:
            return self._comparison()
        inner = _need(self._deeper(self._negation), "truth")
        return Node(op="not", kind="truth", offset=token.offset, args=(inner,))

    def _comparison(self) -> Node:
        left = self._sum()
        if token := self._accept(*_COMPARISONS):
            right = self._sum()
            _same(left, right)
            sign = _COMPARISONS[token.text]
            return Node(op=sign, kind="truth", offset=left.offset, args=(left, right))
        negated = self._accept("not")
        if self._accept("between"):
            low = self._sum()
            self._expect("and")
            node = self._within("between", left, [low, self._sum()])
        elif self._accept("in"):
            self._expect("(")
            node = self._within("in", left, self._arguments())
        elif negated:
            raise self._unexpected("BETWEEN or IN is missing after NOT")
        else:
            return left
        return Node(op="not", kind="truth", offset=left.offset, args=(node,)) if negated else node

    def _within(self, op: str, left: Node, others: list[Node]) -> Node:
        for other in others:
            _same(left, other)
        return Node(op=op, kind="truth", offset=left.offset, args=(left, *others))

    def _arguments(self) -> list[Node]:
        """Read the rest of a list in parentheses."""
        items = [self._any()]
        while self._accept(","):
            items.append(self._any())
        self._expect(")")
        return items

    def _sum(self) -> Node:
        return self._arithmetic(("+", "-"), self._product)

    def _product(self) -> Node:
        return self._arithmetic(("*", "/", "%"), self._signed)

    def _arithmetic(self, signs: tuple[str, ...], below: Callable[[], Node]) -> Node:
        node = below()
        count = 0
        while token := self._accept(*signs):
            count += 1
            if count > MAX_DEPTH:  # the tree leans to the left: a long chain is a deep tree
                raise ExpressionError(f"more than {MAX_DEPTH} terms in a row", token.offset)
            args = (_need(node, "number"), _need(below(), "number"))
            node = Node(op=token.text, kind="number", offset=node.offset, args=args)
        return node

    def _signed(self) -> Node:
        token = self._accept("-")
        if token is None:
            return self._primary()
        inner = _need(self._deeper(self._signed), "number")
        return Node(op="negate", kind="number", offset=token.offset, args=(inner,))

    def _primary(self) -> Node:
        token = self._next
        if self._accept("("):
            node = self._any()
            self._expect(")")
            return node
        if token.type == "number":
            return self._number()
        if token.type == "text":
            self._at += 1
            text = token.text[1:-1].replace("''", "'")
            return Node(op="text", kind="text", offset=token.offset, name=text)
        if token.type == "param":
            return self._param()
        if token.type == "word" and token.text not in _REFUSED:
            return self._word()
        raise self._unexpected(f"a value is missing before {token.text!r}")

    def _number(self) -> Node:
        token = self._next
        self._at += 1
        if not math.isfinite(float(token.text)):
            raise ExpressionError("this number is too large", token.offset)
        return Node(op="number", kind="number", offset=token.offset, name=token.text)

    def _param(self) -> Node:
        token = self._next
        self._at += 1
        name = token.text[1:]
        if name not in self._params:
            hint = suggest(name, self._params)
            raise ExpressionError(f"no parameter `{name}` under `params`{hint}", token.offset)
        return Node(op="param", kind=self._params[name], offset=token.offset, name=name)

    def _word(self) -> Node:
        token = self._next
        self._at += 1
        if token.text in _CONSTANTS:
            return Node(op=token.text, kind=_CONSTANTS[token.text], offset=token.offset)
        if token.text == "case":
            return self._case(token.offset)
        if token.text in _KEYWORDS:
            raise ExpressionError(f"{token.text.upper()} is not expected here", token.offset)
        if self._accept("("):
            return self._call(token)
        if token.text not in evidence.BY_NAME:
            hint = suggest(token.text, evidence.BY_NAME)
            raise ExpressionError(f"no evidence column `{token.text}`{hint}", token.offset)
        kind = column_kind(token.text)
        return Node(op="column", kind=kind, offset=token.offset, name=token.text)

    def _call(self, token: _Token) -> Node:
        if token.text not in FUNCTIONS:
            hint = suggest(token.text, FUNCTIONS) or f"; there are {', '.join(FUNCTIONS)}"
            raise ExpressionError(f"no function `{token.text}` in rules{hint}", token.offset)
        args = [_need(arg, "number") for arg in self._arguments()]
        least, most = FUNCTIONS[token.text]
        if not least <= len(args) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise ExpressionError(f"`{token.text}` takes {wanted} arguments", token.offset)
        return Node(op=token.text, kind="number", offset=token.offset, args=tuple(args))

    def _case(self, offset: int) -> Node:
        args: list[Node] = []
        otherwise = Node(op="null", kind="null", offset=offset)
        values: list[Node] = []
        while self._accept("when"):
            args.append(_need(self._any(), "truth"))
            self._expect("then")
            values.append(self._any())
            args.append(values[-1])
        if not values:
            raise self._unexpected("`WHEN` is missing here")
        if self._accept("else"):
            otherwise = self._any()
        self._expect("end")
        kind: Kind = "null"
        for value in [*values, otherwise]:
            found = _same(values[0], value)
            kind = kind if found == "null" else found
        return Node(op="case", kind=kind, offset=offset, args=(*args, otherwise))
