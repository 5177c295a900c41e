"""The directive `cpp-header`: what a header of fmoe_ext/include declares, with the comments above each declaration.

It reads the layout that .clang-format gives: what is declared begins a line, members are indented by two.
Sphinx parses each declaration and refuses what is no C++. Namespaces `detail` and private members are left out.
"""

import re
from pathlib import Path

import docstrings
from sphinx.util.docutils import SphinxDirective

INCLUDE = Path(__file__).parent.parent / "fmoe_ext" / "include"
CLASS = re.compile(r"(?:struct|class) (\w+)(.*)\{$")


def items(lines, indent=""):
    """(comment, declaration, lines of its body) of each item at this indentation."""
    comment, at = [], 0
    while at < len(lines):
        line = lines[at]
        if line.startswith(indent + "//"):
            comment.append(line.strip()[2:].strip())
        elif re.match(indent + r"[A-Za-z~]", line):
            text, at = declaration(lines, at)
            end = at
            if text.endswith("{"):
                end = next(
                    i
                    for i in range(at, len(lines))
                    if re.match(indent + r"\}", lines[i])
                )
            beside = re.search(r"; +// (.*)", line)
            comment += [beside[1]] if beside else []
            yield comment, text, lines[at + 1 : end]
            comment, at = [], end
        else:
            comment = []
        at += 1


def declaration(lines, at):
    """Joins lines up to the end of a declaration: (its text, the number of the last line)."""
    text = ""
    while True:
        line = re.sub(r"\s*//.*", "", lines[at]).strip()
        text = f"{text} {line}".strip()
        if text.startswith("template") and text.endswith(">"):
            pass
        elif re.search(r"[;{}:]$", line) and text.count("(") == text.count(")"):
            return text, at
        at += 1


def public(lines, is_class):
    """The lines of a class's body that are public."""
    keep, result = not is_class, []
    for line in lines:
        if re.match(r" (public|private|protected):", line):
            keep = "public" in line
        elif keep:
            result.append(line)
    return result


def signature(text):
    """A declaration of a function without its body and storage."""
    text = re.sub(
        r"^((?:template <.*?> )?)(?:(?:inline|static|virtual|explicit) )+", r"\1", text
    )
    text = re.sub(r"\) : .*", ")", text)  # members that a constructor begins with
    text = re.sub(
        r"(\)(?: const)?)(?: override)?(?: = 0| = default)?(?: \{.*|;)?$", r"\1", text
    )
    return text


def described(comment):
    for paragraph in docstrings.paragraphs(comment):
        for item in docstrings.items(paragraph):
            yield from ["", docstrings.markup(item)]


def lines_of(lines, indent=""):
    """reStructuredText of the items of a namespace or class."""
    declared = set()
    for comment, text, body in items(lines, indent):
        kind = CLASS.match(text)
        call = re.search(r"\w+\(", text)
        if re.match(r"~|virtual ~|using [\w:]+;", text) or (
            call and call[0] in declared
        ):
            continue
        if call and not indent and text.endswith(");"):
            declared.add(call[0])  # its definition follows
        if kind:
            bases = re.sub(r"final|\s+$", "", kind[2]).strip()
            shown = [
                f".. cpp:class:: {kind[1]} {bases}".rstrip(),
                *described(comment),
                "",
            ]
            inside = public(body, text.startswith("class"))
            shown += [f"   {line}" for line in lines_of(inside, "  ")]
        elif text.startswith("using "):
            shown = [f".. cpp:type:: {text[6:-1]}", *described(comment)]
        elif "(" in re.sub(r"<[^()]*\([^()]*\)>|= .*", "", text):
            shown = [f".. cpp:function:: {signature(text)}", *described(comment)]
        else:
            shown = members(text, comment)
        yield from [shown[0], *(f"   {line}".rstrip() for line in shown[1:]), ""]


def members(text, comment):
    """`Tensor x, rows;` as one entry with two names."""
    text = re.sub(r"^(?:(?:inline|static|constexpr) )+", "", text)
    listed = re.match(r"(.+?) (\w+(?: = [^,;]+)?(?:, \w+(?: = [^,;]+)?)*);$", text)
    entries = (
        [f"{listed[1]} {name}" for name in listed[2].split(", ")]
        if listed
        else [re.sub(r"( =)? ?[{;]$", "", text)]
    )
    return [
        f".. cpp:var:: {entries[0]}",
        *(f"   {entry}" for entry in entries[1:]),
        *described(comment),
    ]


def read(path):
    """reStructuredText of a header."""
    text = re.sub(
        r"^namespace detail .*?^\}  // namespace detail$",
        "",
        path.read_text(),
        flags=re.M | re.S,
    )
    return lines_of(
        re.sub(r"^.*namespace fmoe\b.*$", "", text, flags=re.M).splitlines()
    )


class Header(SphinxDirective):
    required_arguments = 1

    def run(self):
        path = INCLUDE / self.arguments[0]
        self.env.note_dependency(str(path))
        return self.parse_text_to_nodes(
            "\n".join([".. cpp:namespace:: fmoe", "", *read(path)])
        )


def setup(app):
    app.add_directive("cpp-header", Header)
    return {"parallel_read_safe": True}
