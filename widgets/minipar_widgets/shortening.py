"""JavaScript made shorter, as it means the same: white space and comments go, names of variables become short.

A widget sends its module once per instance, so its size counts. This knows just enough of the language: its tokens, and
where a word is a variable. A name is replaced by one new name everywhere, or nowhere: it must be declared (`const`,
`let`, `function`, a parameter), and never stand where it could be a property (`.name`, `{ name }`, `name:`) or an
export. Then no scope has to be understood. Properties whose names begin with `$` are the modules' own, and shortened
too. Statements must end with `;`, and a loop without a body is written `{}`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
      | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<number>0x[\da-f_]+|(?:\d[\d_]*\.?[\d_]*|\.\d+)(?:e[-+]?\d+)?)
      | (?P<word>[A-Za-z_$][\w$]*)
      | (?P<mark>=>|\.\.\.|\?\.(?!\d)|\?\?=|\|\|=|&&=|\*\*=|[-+*/%&|^]=|===|!==|==|!=|<=|>=|>>>|>>|<<
          |&&|\|\||\?\?|\+\+|--|\*\*|[{}()\[\];,<>+\-*/%&|^!~?:=.])
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_REGEX = re.compile(r"/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\[\n])+/[a-z]*")
_BEFORE_VALUE = frozenset(
    ["", *"([{},;:?=!&|+-*%<>~^", "=>", "&&", "||", "??", "return", "===", "!==", "...", "of", "in"]
)
_BEFORE_BLOCK = frozenset(["", ")", "=>", "else", "do", "try", "finally", ";", "{", "}"])
_KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        """as async await break case catch class const continue default delete do else export extends false finally for
        from get if import in instanceof let new null of return set static super switch this throw true try typeof
        undefined var void while with yield arguments eval NaN Infinity""",
    )
)


class Token(NamedTuple):
    """A piece of the program: `kind` is word, number, string, regex, text (of a template) or mark."""

    kind: str
    text: str
    line: bool = False  # whether a new line began before it

    @property
    def opens(self) -> bool:
        return self.text in ("(", "[", "{") if self.kind == "mark" else self.kind == "text" and self.text.endswith("${")

    @property
    def closes(self) -> bool:
        return self.text in (")", "]", "}") if self.kind == "mark" else self.kind == "text" and self.text[0] == "}"


def tokens(source: str) -> Iterator[Token]:
    """The tokens of a module. Templates give their text as tokens, and the tokens between `${` and `}`."""
    at, before, line = 0, "", False
    templates: list[int] = []  # braces that are open inside each template's expression
    while at < len(source):
        if source[at] == "`" or (source[at] == "}" and templates and templates[-1] == 0):
            if source[at] == "}":
                templates.pop()
            end = at + 1
            while source[end] != "`" and source[end : end + 2] != "${":
                end += 2 if source[end] == "\\" else 1
            end += 1 if source[end] == "`" else 2
            if source[end - 1] == "{":
                templates.append(0)
            yield Token("text", source[at:end], line)
            at, before, line = end, ")" if source[end - 1] == "`" else "(", False
            continue
        found = _REGEX.match(source, at) if source[at] == "/" and before in _BEFORE_VALUE else None
        kind = "regex"
        if found is None or source[at : at + 2] in ("//", "/*"):
            found = _TOKEN.match(source, at)
            if found is None:
                raise ValueError(f"no JavaScript that is known here: {source[at : at + 40]!r}")
            kind = str(found.lastgroup)
        at = found.end()
        if kind == "space":
            line = line or "\n" in found[0]
            continue
        if templates and found[0] in "{}":
            templates[-1] += 1 if found[0] == "{" else -1
        yield Token(kind, found[0], line)
        before, line = found[0], False


def shorten(source: str) -> str:
    """The module in fewer bytes."""
    found = _plainer(list(tokens(source)))
    names = _names(found)
    parts: list[str] = []
    last, depth = Token("", ""), 0
    for token in found:
        depth += token.opens - token.closes
        text = names.get(token.text, token.text) if token.kind == "word" else token.text
        wordlike = last.kind in ("word", "number", "regex") and token.kind in ("word", "number")
        if token.line and not depth and not token.closes and last.text in ("}", ";"):
            parts.append("\n")  # where the next declaration begins: for those who read it after all
        elif wordlike or (last.text[-1:] in ("+", "-") and token.text[0] == last.text[-1]):
            parts.append(" ")
        if text in ("}", "]") and token.closes and last.text in (",", ";"):
            parts.pop()
        parts.append(text)
        last = token
    return "".join(parts) + "\n"


def _plainer(found: list[Token]) -> list[Token]:
    """The same program in other words: one `let` for neighbouring `const`s, names for Math's functions, .5 for 0.5."""
    made: list[Token] = []
    opened: list[str] = [""]
    starts = [""]  # the first word of the statement under way, for each open bracket
    three = zip(found, found[1:], found[2:], strict=False)
    maths = Counter(c.text for a, b, c in three if a.text == "Math" and b.text == ".")
    known = [name for name, uses in maths.items() if uses > 2]
    skip = 0
    for k, token in enumerate(found):
        if skip:
            skip -= 1
            continue
        kind, text, line = token
        if kind == "word" and text == "Math" and k + 2 < len(found) and found[k + 2].text in known:
            token, skip = Token("word", f"$math_{found[k + 2].text}", line), 2
        elif kind == "word" and text in ("true", "false") and not (made and made[-1].text == "."):
            made += [Token("mark", "!", line), Token("number", "0" if text == "true" else "1")]
            continue
        elif kind == "number" and text.startswith("0."):
            token = Token(kind, text[1:], line)
        elif (
            kind == "string" and found[k + 1].text == ":" and made[-1].text in ("{", ",") and text[1:-1].isidentifier()
        ):
            token = Token("word", text[1:-1], line)
        elif kind == "word" and text in ("const", "let"):
            if opened[-1] != "(" and starts[-1] == "let" and made[-1].text == ";":
                made[-1] = Token("mark", ",")
                continue
            token = Token(kind, "let", line)
        if token.closes:
            opened.pop()
            starts.pop()
            if text == "}" and starts[-1] != "let":  # the end of a block, and so of a statement
                starts[-1] = ""
        if token.opens:
            opened.append(text[-1])
            starts.append("")
        elif text == ";":
            following = found[k + 1].text if k + 1 < len(found) else ""
            starts[-1] = "let" if starts[-1] == "let" and following in ("const", "let") else ""
        elif not starts[-1] and not token.closes:
            starts[-1] = token.text
        made.append(token)
    aliases = ", ".join(f"$math_{name} = Math.{name}" for name in known)
    return [*(tokens(f"let {aliases};\n") if aliases else ()), *made]


def _names(found: list[Token]) -> dict[str, str]:
    """A short name for every name that can have one, the most frequent first."""
    declared, kept = _declared(found), _kept(found)
    uses = Counter(token.text for token in found if token.kind == "word")
    taken = set(uses) | _KEYWORDS
    short = (name for name in map(_letters, count()) if name not in taken)
    own = {name for name in uses if name[0] == "$" and len(name) > 1}
    chosen = sorted((declared - kept - _KEYWORDS) | own, key=lambda name: (-uses[name] * len(name), name))
    pairs = zip([name for name in chosen if len(name) > 1], short, strict=False)
    return {name: other for name, other in pairs if len(other) < len(name)}


def _letters(k: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    name = letters[k % 52]
    while k := k // 52:
        k -= 1
        name += letters[k % 52]
    return name


def _declared(found: list[Token]) -> set[str]:
    """Names that the module declares: variables, functions, parameters."""
    declared: set[str] = set()
    opened: list[int] = []  # places of open brackets
    declaring = [False]  # for each of them, whether a `const` or `let` is under way
    for k, token in enumerate(found):
        before = found[k - 1].text if k else ""
        after = found[k + 1].text if k + 1 < len(found) else ""
        if token.closes:
            first = opened.pop()
            declaring.pop()
            head = found[first - 1] if first else Token("", "")
            if token.text == ")" and (
                after == "=>" or (after == "{" and head.text not in ("if", "for", "while", "switch"))
            ):
                inside = zip(found[first:k], found[first + 1 : k], strict=False)
                declared |= {b.text for a, b in inside if b.kind == "word" and a.text in ("(", ",", "[", "...")}
        if token.opens:
            opened.append(k)
            declaring.append(token.text == "[" and declaring[-1] and before in ("const", "let", ","))
        elif token.closes:
            continue
        elif token.text in ("const", "let"):
            declaring[-1] = True
        elif token.text in (";", "of", "in") and token.kind != "string":
            declaring[-1] = False
        elif token.kind == "word" and (
            before == "function" or after == "=>" or (declaring[-1] and before in ("const", "let", ",", "[", "..."))
        ):
            declared.add(token.text)
    return declared


def _kept(found: list[Token]) -> set[str]:
    """Names that stand, anywhere, where they could be a property or an export."""
    kept: set[str] = set()
    opened: list[str] = []
    for k, token in enumerate(found):
        before = found[k - 1].text if k else ""
        after = found[k + 1].text if k + 1 < len(found) else ""
        if token.closes:
            opened.pop()
        if token.opens:
            block = token.text == "{" and before in _BEFORE_BLOCK
            opened.append("block" if block else token.text if token.kind == "mark" else "text")
        elif token.kind == "word":
            in_object = before in ("{", ",") and opened[-1:] == ["{"]
            exported = k > 1 and before in ("function", "const", "let", "class") and found[k - 2].text == "export"
            if before in (".", "?.") or exported or in_object or (before in ("async", "get", "set") and after == "("):
                kept.add(token.text)
    return kept
