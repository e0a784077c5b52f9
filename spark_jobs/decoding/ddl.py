"""Writes Spark DDL from names and types, and checks without a JVM whether text is DDL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from stream_consumers.errors import SchemaMismatchError

MAX_COLUMN_NAME_LENGTH = 1000
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOKEN = re.compile(
    r"(?P<space>\s+|--[^\n]*|/\*.*?\*/)|(?P<name>`(?:[^`]|``)*`)|(?P<text>[rR]?(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"))"
    r"|(?P<word>\w+)|(?P<sign>[<>(),:])|(?P<other>.)",
    re.DOTALL,
)
_MAX_DIGITS = 38
# Spark (before it parses a text) and Hadoop (in each setting) replace ${…} by a setting or an environment variable.
VARIABLE = "${"
# A variable, quotes, backslashes, control characters, and the line breaks of Unicode.
_UNSAFE_IN_NAME = re.compile(r'\$\{|["\\\x00-\x1f\x7f-\x9f\u2028\u2029]')
_INTERNAL = ("__delta_internal", "_tmp_metadata", "_stream_assets_")
_TYPES = frozenset(
    (
        *("boolean", "tinyint", "byte", "smallint", "short", "int", "integer", "bigint", "long", "float", "real"),
        *("double", "date", "timestamp", "timestamp_ntz", "timestamp_ltz", "time", "string", "char", "character"),
        *("varchar", "binary", "decimal", "dec", "numeric", "void", "interval", "variant", "geometry", "geography"),
        *("array", "map", "struct"),
    )
)
# The words that may follow the name of a type, besides numbers in parentheses.
_UNITS = ("year", "month", "day", "hour", "minute", "second")
_WORDS = {
    "interval": (*_UNITS, *(f"{unit}s" for unit in _UNITS), "to"),
    "timestamp": ("with", "without", "local", "time", "zone"),
    "time": ("without", "time", "zone"),
}
_DECIMALS = ("decimal", "dec", "numeric")
_WITH_NUMBERS = (*_DECIMALS, "char", "character", "varchar", "time", "geometry", "geography")


def quoted(name: str) -> str:
    """Quote a name for DDL, whatever characters it has.

    Example:
        >>> quoted("a`b")
        '`a``b`'
    """
    return f"`{name.replace('`', '``')}`"


def name_ddl(name: str) -> str:
    """Quote a name for DDL only if it needs it, because back quotes mean something else to a shell.

    Example:
        >>> name_ddl("user_id"), name_ddl("user-id")
        ('user_id', '`user-id`')
    """
    return name if _PLAIN_NAME.fullmatch(name) else quoted(name)


def column_ddl(name: str, kind: str) -> str:
    """Write a column."""
    return f"{quoted(name)} {kind}"


def struct_ddl(fields: Iterable[tuple[str, str]]) -> str:
    """Write a STRUCT of these names and types.

    Example:
        >>> struct_ddl([("id", "BIGINT"), ("name", "STRING")])
        'STRUCT<`id`: BIGINT, `name`: STRING>'
    """
    return f"STRUCT<{', '.join(f'{quoted(name)}: {kind}' for name, kind in fields)}>"


def check_distinct(names: Sequence[str], path: str) -> None:
    """Refuse names that Spark cannot distinguish, or that are longer than :data:`MAX_COLUMN_NAME_LENGTH`.

    Args:
        names: the names of the fields of a STRUCT, or of columns.
        path: the path of the STRUCT, for the error.

    Raises:
        SchemaMismatchError: a name is repeated or too long; it names it.

    Example:
        >>> check_distinct(["id", "user", "ID"], "shop.Order")
        Traceback (most recent call last):
        stream_consumers.errors.SchemaMismatchError: shop.Order has the field 'ID' twice, whether in upper or lower \
case. Spark does not distinguish them: read with a schema that has one of them.
    """
    longest = max(map(len, names), default=0)
    if longest > MAX_COLUMN_NAME_LENGTH:
        raise SchemaMismatchError(
            f"a field in the schema has a name of {longest} characters",
            remedy=f"Use names of at most {MAX_COLUMN_NAME_LENGTH}.",
        )
    if twice := first_duplicate(names):
        raise SchemaMismatchError(
            f"{path} has the field {twice!r} twice, whether in upper or lower case",
            remedy="Spark does not distinguish them: read with a schema that has one of them.",
        )


def first_duplicate(names: Iterable[str]) -> str | None:
    """Return the first repeated name, also in upper or lower case, as Spark and Delta compare; see :func:`name_keys`.

    Example:
        >>> first_duplicate(["id", "user", "ID"])
        'ID'
    """
    seen: set[str] = set()
    for name in names:
        if not seen.isdisjoint(name_keys(name)):
            return name
        seen |= name_keys(name)
    return None


def name_keys(name: str) -> frozenset[str]:
    r"""Return the keys of a name. Spark or Delta treats two names as equal if they share a key.

    Spark compares characters, see :func:`folded`, and Delta compares names in lower case.

    Example:
        >>> name_keys("User") == {"user"}, name_keys("\u0130d") == {"id", "i\u0307d"}
        (True, True)
    """
    return frozenset((folded(name), name.lower()))


def folded(name: str) -> str:
    r"""Return a key that is the same for names which Java's ``equalsIgnoreCase``, and so Spark, treats as equal.

    Example:
        >>> folded("User"), folded("u\u017fer"), folded("\u0131d"), folded("\u0130D"), folded("Straße")
        ('user', 'user', 'id', 'id', 'straße')
    """
    # Keep one character for each, although Python changes the case of ß and of İ into two characters.
    upper = (one if len(one.upper()) > 1 else one.upper() for one in name)
    return "".join(one.lower()[0] for one in upper)


def is_internal(name: str) -> bool:
    """Return whether Spark, Delta or this package adds such a column when it reads or writes rows.

    Two columns of one name may make a table unreadable, or stop each write.

    Example:
        >>> is_internal("_tmp_metadata_row_index"), is_internal("metadata")
        (True, False)
    """
    return folded(name).startswith(_INTERNAL)


def is_safe_name(name: str) -> bool:
    r"""Return whether Spark reads the name of a column as plain text.

    Delta writes names into Java source unescaped. Spark writes them into settings of Hadoop, which replaces variables,
    and then into the footers of Parquet files.

    Example:
        >>> is_safe_name("straße 😀"), is_safe_name('a"b'), is_safe_name("a\\u0022b"), is_safe_name("${env.HOME}")
        (True, False, False, False)
    """
    return not _UNSAFE_IN_NAME.search(name)


def declared_types(ddl: str) -> frozenset[str]:
    """Return the names of the types in column definitions, in lower case, without a JVM.

    Args:
        ddl: the column definitions; everything that Spark's parser accepts is accepted.

    Raises:
        SchemaMismatchError: they are not DDL; it names the first wrong token and its position.

    Example:
        >>> sorted(declared_types("id BIGINT NOT NULL, tags ARRAY<STRUCT<a: DECIMAL(10,2)>> COMMENT 'x'"))
        ['array', 'bigint', 'decimal', 'struct']
        >>> declared_types("id INTT")
        Traceback (most recent call last):
        stream_consumers.errors.SchemaMismatchError: the schema 'id INTT' is not Spark DDL: 'INTT' at character 4 is \
not a type. Write it like 'id BIGINT, user STRING'.
    """
    parser = _DdlParser(ddl)
    if parser.next_is("struct") and parser.next_is("<", ahead=1):
        parser.read_type()
    else:
        parser.read_fields()
    parser.expect("")
    return frozenset(parser.types)


class _DdlParser:
    """A recursive descent parser for DDL."""

    def __init__(self, ddl: str) -> None:
        self.types: set[str] = set()
        self._ddl = ddl
        found = [match for match in _TOKEN.finditer(ddl) if match.lastgroup != "space"]
        self._tokens = [(match.lastgroup or "", match[0], match.start() + 1) for match in found]
        # The parser looks ahead past the end, but never moves past it.
        self._tokens += [("end", "", len(ddl) + 1)] * 2
        self._at = 0

    def next_is(self, text: str, *, ahead: int = 0) -> bool:
        kind, found, _ = self._tokens[self._at + ahead]
        return kind in ("word", "sign", "end") and found.lower() == text

    def skip(self, text: str) -> bool:
        is_there = self.next_is(text)
        self._at += is_there
        return is_there

    def expect(self, *texts: str) -> None:
        if not any(map(self.skip, texts)):
            raise self._fault(f"is not {' or '.join(repr(text) if text else 'the end' for text in texts)}")

    def read_fields(self) -> None:
        while True:
            self._read("a name", "word", "name")
            self.skip(":")
            self.read_type()
            if self.skip("not"):
                self.expect("null")
            if self.skip("comment"):
                self._read("text in quotes", "text")
                while self._tokens[self._at][0] == "text":
                    self._at += 1
            if not self.skip(","):
                return

    def read_type(self) -> None:
        kind, word, _ = self._tokens[self._at]
        name = word.lower()
        if kind != "word" or name not in _TYPES:
            raise self._fault("is not a type")
        self.types.add(name)
        self._at += 1
        if name == "struct":
            self.expect("<")
            if not self.skip(">"):
                self.read_fields()
                self.expect(">")
        elif name in ("array", "map"):
            self.expect("<")
            self.read_type()
            if name == "map":
                self.expect(",")
                self.read_type()
            self.expect(">")
        else:
            while self._tokens[self._at][1].lower() in _WORDS.get(name, ()):
                self._at += 1
            if name in _WITH_NUMBERS and self.next_is("("):
                self._read_numbers(name)
            if name == "string" and self.skip("collate"):
                self._read("a collation", "word", "name")

    def _read_numbers(self, name: str) -> None:
        self._at += 1
        start, numbers = self._at, [self._read_number()]
        while self.skip(","):
            numbers.append(self._read_number())
        self.expect(")")
        precision, scale = (*numbers, 0)[:2]
        if name in _DECIMALS and (precision > _MAX_DIGITS or scale > precision or len(numbers) > 2):
            self._at = start
            raise self._fault(f"does not begin a precision of at most {_MAX_DIGITS} and a scale of at most that")

    def _read_number(self) -> int:
        text = self._read("a number", "word")
        if text.isdecimal():
            return int(text)
        self._at -= 1
        raise self._fault("is not a number")

    def _read(self, wanted: str, *kinds: str) -> str:
        kind, text, _ = self._tokens[self._at]
        if kind not in kinds:
            raise self._fault(f"is not {wanted}")
        self._at += 1
        return text

    def _fault(self, what: str) -> SchemaMismatchError:
        _, text, position = self._tokens[self._at]
        place = f"{text!r} at character {position}" if text else f"the end, at character {position},"
        return SchemaMismatchError(
            f"the schema {self._ddl!r} is not Spark DDL: {place} {what}",
            remedy="Write it like 'id BIGINT, user STRING'.",
        )
