"""Text for people: untrusted bytes and text without terminal control characters, and numbers with nouns."""

from __future__ import annotations

from typing import overload

ELLIPSIS = "…"


@overload
def as_text(data: bytes) -> str | None: ...
@overload
def as_text(data: None) -> None: ...
def as_text(data: bytes | None) -> str | None:
    r"""Decode bytes as UTF-8; return ``None`` if they are not valid UTF-8.

    Example:
        >>> as_text(b'{"id": 1}'), as_text(b"\xff\x00")
        ('{"id": 1}', None)
    """
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None


def printable(text: str) -> str:
    r"""Return the text as one line, with every non-printable character escaped.

    Example:
        >>> print(printable("caf\u00e9\x1b[2J\n\u202e"))
        café\x1b[2J\n\u202e
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: str) -> str:
    r"""Apply :func:`printable` to each line of a text, and keep the line breaks.

    Example:
        >>> print(printable_lines("a\x1b[2J\nb"))
        a\x1b[2J
        b
    """
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def shortened(text: str, most: int) -> str:
    """Truncate the text to ``most`` characters; an ellipsis marks the truncation.

    Example:
        >>> shortened("a dead letter", 6), shortened("short", 6)
        ('a dea…', 'short')
    """
    return text if len(text) <= most else text[: max(0, most - 1)] + ELLIPSIS


def shown_bytes(data: bytes | None, *, most: int | None = None) -> str:
    r"""Return bytes as one readable line: text if they are UTF-8, else hexadecimal digits; long ones are truncated.

    Args:
        data: the bytes; ``None`` is shown as a dash, and empty bytes as "(empty)".
        most: the approximate limit of characters, after which the number of bytes is shown; no limit by default.

    Example:
        >>> shown_bytes(b'{"id": 1}\n'), shown_bytes(b"\xff\x00\x01", most=6), shown_bytes(b""), shown_bytes(None)
        ('{"id": 1}\\n', '0xff0… (3 bytes)', '(empty)', '–')
    """
    if data is None:
        return "–"
    if not data:
        return "(empty)"
    text = as_text(data)
    shown = f"0x{(data if most is None else data[:most]).hex()}" if text is None else printable(text[:most])
    if most is None or (len(shown) <= most and (text is None or len(text) <= most)):
        return shown
    return f"{shortened(shown + ELLIPSIS, most)} ({len(data)} bytes)"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun in the singular or plural.

    Args:
        count: the number.
        noun: the singular.
        plural: the plural; by default, the noun with an "s".

    Example:
        >>> counted(1, "shard"), counted(0, "dead letter"), counted(2, "entry", "entries")
        ('1 shard', '0 dead letters', '2 entries')
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
