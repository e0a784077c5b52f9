"""Checks expressions, names and properties in the metadata of a Delta table, which Spark uses when rows are written.

Anyone who can write the table's log can choose their text. Delta refuses a subquery or a call of Java when a user
defines an expression, but does not check the expressions in a log, and Spark would run both with the rights of the run.
Delta also makes constraints of VARCHAR columns and others, and writes the names of their columns into Java source.
The properties of a table are settings of Hadoop while it is written, and may choose classes; Hadoop replaces variables
in them and in the columns, and Spark writes the result into Parquet files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from deltalake import Schema

from spark_jobs.decoding.ddl import VARIABLE, is_safe_name, quoted
from stream_consumers.display import printable, shortened
from stream_consumers.errors import UnsupportedError

CHECK = "delta.constraints."
GENERATED = "delta.generationExpression"
DEFAULT = "CURRENT_DEFAULT"
_INVARIANT = "delta.invariants"
_KEYS = (GENERATED, DEFAULT, "EXISTS_DEFAULT", _INVARIANT)
# The words that are allowed before a parenthesis: functions that Delta allows in columns and constraints, similar ones,
# and words of Spark's SQL that are not functions. None of them reads a file, runs Java or Python, or takes a path or
# the text of a type, which may name a Java class.
_CALLABLE = """
abs acos acosh add_months aggregate array array_append array_compact array_contains array_distinct array_except
array_insert array_intersect array_join array_max array_min array_position array_prepend array_remove
array_repeat array_size array_sort array_union arrays_overlap arrays_zip ascii asin asinh atan atan2 atanh
base64 bigint bin binary bit_count bit_get bit_length boolean bround btrim cardinality cast cbrt ceil ceiling
char char_length character_length chr coalesce collate concat concat_ws contains conv convert_timezone cos cosh
cot crc32 csc curdate current_date current_timestamp current_user date date_add date_diff date_format
date_from_unix_date date_part date_sub date_trunc dateadd datediff datepart day dayname dayofmonth dayofweek
dayofyear dec decimal decode degrees double e element_at elt encode endswith equal_null exists exp expm1
extract factorial filter find_in_set flatten float floor forall format_number format_string
from_unixtime from_utc_timestamp get get_json_object getbit greatest hash hex hour hypot if ifnull ilike
initcap instr int integer is_valid_utf8 is_variant_null isnan isnotnull isnull json_array_length
json_object_keys last_day lcase least left len length levenshtein like ln localtimestamp locate log log10 log1p
log2 lower lpad ltrim luhn_check make_date make_dt_interval make_interval make_timestamp make_timestamp_ltz
make_timestamp_ntz make_ym_interval map map_concat map_contains_key map_entries map_filter map_from_arrays
map_from_entries map_keys map_values map_zip_with mask md5 minute mod month monthname months_between
named_struct nanvl negative next_day now nullif nullifzero numeric nvl nvl2 octet_length overlay parse_json
parse_url pi pmod position positive pow power printf quarter radians reduce regexp regexp_count regexp_extract
regexp_extract_all regexp_instr regexp_like regexp_replace regexp_substr repeat replace reverse right rint
rlike round rpad rtrim sec second sentences sequence session_user sha sha1 sha2 shiftleft shiftright
shiftrightunsigned sign signum sin sinh size slice smallint sort_array soundex space split split_part sqrt
startswith str_to_map string struct substr substring substring_index tan tanh time timestamp timestamp_micros
timestamp_millis timestamp_ntz timestamp_seconds timestampadd timestampdiff tinyint to_binary to_char to_date
to_json to_number to_timestamp to_timestamp_ltz to_timestamp_ntz to_unix_timestamp to_utc_timestamp to_varchar
transform transform_keys transform_values translate trim trunc try_add try_cast try_divide try_element_at
try_mod try_multiply try_parse_json try_subtract try_to_binary try_to_date try_to_number try_to_timestamp
try_url_decode typeof ucase unbase64 unhex unix_date unix_micros unix_millis unix_seconds
unix_timestamp upper url_decode url_encode uuid varchar weekday weekofyear when width_bucket
xxhash64 year zeroifnull zip_with

all and any between case distinct div else escape from in interval is not or some then
"""
_KNOWN = frozenset(_CALLABLE.split())
# Each query begins with one of these words, or with FROM, which is also allowed in extract(YEAR FROM at).
_QUERY = frozenset({"select", "values", "table", "with", "using"})
# The tokens of Spark's lexer, for ASCII without comments. Anything else is refused, and so is a quoted text directly
# after a word that ends with r, which Spark may read as a raw string, and a name that is not safe in Java.
_TOKEN = re.compile(
    r"""(?P<space>[ \r\n\t]+)
    |(?P<text>(?<![\w.])[rR](?:'[^']*'|"[^"]*")|'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*"|`(?:[^`"\\\r\n]|``)*`)
    |(?P<word>[A-Za-z0-9_]+(?![A-Za-z0-9_]|(?<=[rR])['"]))
    |(?P<sign>-(?!-)|/(?![*/])|\|(?!>)|[][(),.:+*%=<>!&^~])""",
    re.DOTALL | re.VERBOSE,
)
# No setting of Hadoop, Parquet or Spark has a name without a dot, or one that begins with one of these.
_PROPERTIES = ("delta.", "stream-assets.", "pipelines.")
_SHOWN, _SHOWN_PART = 200, 40


def check_expression(text: str, *, where: str) -> None:
    """Refuse an expression that may read other tables or files, or run code.

    It must not have a query, a comment or a variable, and may only call functions on a list of harmless ones.
    Spark's own parser is not available when a table is only read, nor with Spark Connect.

    Args:
        text: the expression, in SQL.
        where: the name of the place where it was found, for the error.

    Raises:
        UnsupportedError: it has anything else.

    Example:
        >>> check_expression("amount > 0 AND extract(YEAR FROM at) > 1999", where="the constraint x")
        >>> check_expression("reflect('java.lang.Runtime', 'getRuntime') IS NULL", where="the constraint x")
        Traceback (most recent call last):
            ...
        stream_consumers.errors.UnsupportedError: the constraint x may run code or read other tables, by reflect(: ...
    """
    if (found := _unsafe(text)) is not None:
        raise UnsupportedError(
            f"{where} may run code or read other tables, by {shortened(printable(found), _SHOWN_PART)}: "
            f"{shortened(printable(text), _SHOWN)}",
            remedy="If it is yours, write it without queries, comments and ${, with built-in functions that work on "
            "one row only, and with back quotes around column names that are not plain words, or are words of SQL.",
        )


def _unsafe(text: str) -> str | None:
    """Return the part of an expression that may be harmful; ``None`` if all of it is harmless."""
    if VARIABLE in text:
        return VARIABLE
    at, kind, part, is_qualified = 0, "sign", "", False
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            return text[at:]
        at = found.end()
        if found.lastgroup == "space":
            continue
        kind_before, before, was_qualified = kind, part, is_qualified
        kind, part, is_qualified = found.lastgroup or "", found[0].lower(), before == "."
        # There is no operand before the word; a FROM that begins is that of a query.
        begins = kind_before == "sign" and before not in (")", "]")
        # A star that is no multiplication stands for all columns, whatever their names are.
        if (kind == "word" and (part in _QUERY or (part == "from" and begins))) or (part == "*" and begins):
            return part
        if part == "(" and kind_before != "sign" and (was_qualified or before not in _KNOWN):
            return f"{before}("
    return None


def unsafe_property(names: Iterable[str]) -> str | None:
    """Return a name of a table property that may also be a setting of Hadoop, Parquet or Spark; ``None`` without one.

    Example:
        >>> unsafe_property(["delta.appendOnly", "team"]), unsafe_property(["fs.file.impl"])
        (None, 'fs.file.impl')
    """
    return next((name for name in names if "." in name and not name.lower().startswith(_PROPERTIES)), None)


def check_metadata(
    path: str, configuration: Mapping[str, str], columns: Sequence[Mapping[str, Any]], *, others: object = None
) -> None:
    """Refuse a table with an expression that :func:`check_expression` refuses, or with an unsafe name or property.

    Args:
        path: the path of the table.
        configuration: the table properties.
        columns: the columns in the format of the log.
        others: the other texts of the metadata, in which there must not be variables either.

    Raises:
        UnsupportedError: a part of the metadata may be harmful; it names the constraint, the column or the property.
    """
    if (setting := unsafe_property(configuration)) is not None:
        shown = shortened(printable(setting), _SHOWN)
        raise UnsupportedError(
            f"{path} has the property {shown}, which may also be a setting of Hadoop, and Spark would use it as one",
            remedy="Remove it with ALTER TABLE … UNSET TBLPROPERTIES in another program, or give it a name without "
            "dots. If you do not know which program set it, find out who can write there.",
        )
    if (unsafe := unsafe_name(columns)) is not None:
        shown = shortened(printable(unsafe), _SHOWN)
        raise UnsupportedError(
            f"{path} has a column or field {shown}, which Java or Hadoop may not read as plain text",
            remedy="Rename it to a name without ${, quotes, backslashes, line breaks and control characters, with "
            "ALTER TABLE … RENAME COLUMN … TO … in another program, or RESTORE the table to a version without it. If "
            "you do not know which program added it, find out who can write there.",
        )
    # JSON escapes neither character, and has no ${ of its own.
    if VARIABLE in json.dumps([dict(configuration), list(columns), others]):
        raise UnsupportedError(
            f"{path} has {VARIABLE} in a comment, a property or another text of its metadata: Hadoop may replace it by "
            "a secret of the run, which Spark then writes into the files of the table",
            remedy="Change this text with ALTER TABLE … in another program, or RESTORE the table to a version without "
            "it. If you do not know which program wrote it, find out who can write there.",
        )
    for name, text in configuration.items():
        if name.lower().startswith(CHECK):
            check_expression(text, where=f"the CHECK constraint {printable(name[len(CHECK) :])} of {path}")
    for name, text in _of_columns(columns):
        # Delta makes a constraint of the name and the expression of a generated column.
        for part in (text, quoted(name)):
            check_expression(part, where=f"an expression of the column {printable(name)} of {path}")


def foreign_options(path: str) -> UnsupportedError:
    """Return the error for a table whose format has options, which are settings of Hadoop for Spark."""
    return UnsupportedError(
        f"the format in the metadata of {path} has options, which no program sets, and Spark would use as settings",
        remedy="RESTORE the table to a version before the one that added them. If you do not know which program wrote "
        "them, find out who can write there.",
    )


def check_checksum(path: str, text: str) -> None:
    """Check the metadata of a checksum file, which Spark uses as those of the table, and their types.

    delta-rs ignores a checksum file that it cannot parse, and reads the commits. Java may still be able to parse it.

    Args:
        path: the path of the table.
        text: the text of the file; an empty file comes from a power cut, and is never read.

    Raises:
        UnsupportedError: an expression or a name may run code or read other tables.
        ValueError: it is not JSON, has a name twice, or a type that is not Delta's.
    """
    with _unknown_forms():
        _check_read_metadata(path, _object(text).get("metadata") or {})


def check_last_checkpoint(path: str, text: str) -> None:
    """Check the types and the metadata in ``_last_checkpoint``, which Spark uses for those of the checkpoint.

    Args:
        path: the path of the table.
        text: the text of the file; an empty file comes from a power cut, and is never read.

    Raises:
        UnsupportedError: an expression or a name may run code or read other tables.
        ValueError: it is not JSON, has a name twice, or a type that is not Delta's.
    """
    with _unknown_forms():
        found = _object(text)
        if (schema := found.get("checkpointSchema")) is not None:
            Schema.from_json(json.dumps(schema))
            check_metadata(path, {}, schema["fields"])
        for action in (found.get("v2Checkpoint") or {}).get("nonFileActions") or []:
            _check_read_metadata(path, action.get("metaData") or {})


def _check_read_metadata(path: str, metadata: Mapping[str, Any]) -> None:
    configuration = {name: str(value) for name, value in (metadata.get("configuration") or {}).items()}
    schema = metadata.get("schemaString") or '{"type": "struct", "fields": []}'
    # delta-rs knows only the types of Delta, at any depth. Spark would load the class that a user-defined type names.
    Schema.from_json(schema)
    # What this leaves out is checked with the columns and the properties.
    others = {name: text for name, text in metadata.items() if name not in ("schemaString", "configuration")}
    if (metadata.get("format") or {}).get("options"):
        raise foreign_options(path)
    check_metadata(path, configuration, read_strictly(schema)["fields"], others=others)


def _object(text: str) -> dict[str, Any]:
    return read_strictly(text) if text.strip() else {}


@contextmanager
def _unknown_forms() -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it has an unknown form: {error}") from None


def read_strictly(text: str) -> dict[str, Any]:
    """Parse a JSON object that every parser reads in the same way. Numbers become text, as Python refuses long ones.

    Raises:
        ValueError: it is not JSON, or has a name twice.
    """
    found: dict[str, Any] = json.loads(text, object_pairs_hook=_unique, parse_int=str, parse_float=str)
    return found


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has a name twice")
    return found


def unsafe_name(columns: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a name of a column, or of a field at any depth, that is not safe in Java; ``None`` if all are.

    Args:
        columns: the columns in the format of the log.
    """
    return next((name for _, part in _parts(columns) if not is_safe_name(name := str(part.get("name", "")))), None)


def _of_columns(columns: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for name, part in _parts(columns):
        metadata = part.get("metadata") or {}
        yield from ((name, str(metadata[key])) for key in _KEYS if key in metadata and key != _INVARIANT)
        if _INVARIANT in metadata:
            # A JSON object. If it has a key twice, both values are checked.
            yield from ((name, text) for text in _texts(_json(str(metadata[_INVARIANT]))))


def _parts(columns: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the columns, and the fields and types in them at any depth, each with the name of its column."""
    left: list[tuple[str, Any]] = [(column["name"], column) for column in columns]
    while left:
        name, part = left.pop()
        if isinstance(part, Mapping):
            yield name, part
            left += [(name, inner) for key, inner in part.items() if key != "metadata"]
        elif isinstance(part, list):
            left += [(name, inner) for inner in part]


def _json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=list)
    except (TypeError, ValueError, RecursionError):
        return text


def _texts(part: object) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, (list, tuple)):
        for inner in part:
            yield from _texts(inner)
