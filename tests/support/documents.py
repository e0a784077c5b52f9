"""Reads the documentation as a test needs it: its blocks of code, its links, and the names that it mentions."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path

FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
QUOTED = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page.

    Args:
        page: the path of the page.
        line: where it begins.
        language: what stands behind the fence.
        text: what is in it.
    """

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found["language"], found["text"])
        for found in FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """The targets of the links and images of a page."""
    return [found["target"] for found in LINK.finditer(prose(page))]


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page may end with, as GitHub makes it of the heading."""
    words = (heading.replace("`", "").lower().strip() for heading in HEADING.findall(prose(page)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words}


def mentioned(page: Path) -> list[str]:
    """What stands in back quotes on a page."""
    return QUOTED.findall(prose(page))


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a block of shell lines, without comments and redirections.

    Example:
        >>> list(commands("cat a | jq .id   # ids\\nexport A=1 && ls"))
        [['cat', 'a'], ['jq', '.id'], ['export', 'A=1'], ['ls']]
    """
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def resolve(name: str) -> object:
    """What a dotted name is about; ``name(option)`` must have the option.

    Raises:
        AssertionError, AttributeError: there is no such module, name or option.
    """
    path, _, option = name.removesuffix(")").partition("(")
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for index, part in enumerate(parts[length:], start=length + 1):
            is_field = is_dataclass(found) and part in {field.name for field in fields(found)}
            if is_field and index == len(parts):
                return found
            found = getattr(found, part)
        if option:
            assert callable(found)
            assert option in inspect.signature(found).parameters, f"{path} has no option {option}"
        return found
    raise AssertionError(f"no module of {name}")
