"""Json, lenient, beside Spark's from_json: what Json takes, from_json takes, with the same value.

Spark parses all documents with all schemas in one go. Where ours differs it is in :data:`DIFFERENCES`, and in the
documentation: docs/payloads.md. What from_json makes of values that a column cannot hold as they are is not compared:
``test_exact_values.py`` says what becomes of those.
"""

import json
import math
import re

import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, MapType, VariantType

from spark_jobs.decoding.json_decoder import Json
from spark_jobs.reading.source import arrow_schema, struct_type
from spark_jobs.reading.variants import has_variant
from tests.support.payloads import TIMES
from tests.support.profiles import examples
from tests.support.settings import ROOT

pytestmark = pytest.mark.spark
ANY = ".*"
CORRUPT = "_corrupt"
NAMES = "abcd"
LEAVES = (
    *("BIGINT", "INT", "SMALLINT", "DOUBLE", "FLOAT", "BOOLEAN", "STRING", "STRING", "BINARY", "DATE", "DATE"),
    *("TIMESTAMP", "TIMESTAMP", "TIMESTAMP", "TIMESTAMP_NTZ", "DECIMAL(10,2)", "DECIMAL(38,0)", "DECIMAL(38,38)"),
    *("DECIMAL(5,5)", "VARIANT"),
)
TYPES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: (
        inner.map("ARRAY<{}>".format)
        | inner.map("MAP<STRING, {}>".format)
        | st.tuples(inner, inner).map(lambda kinds: f"STRUCT<a: {kinds[0]}, b: {kinds[1]}>")
    ),
    max_leaves=3,
)
SCHEMAS = st.tuples(*[TYPES] * len(NAMES)).map(
    lambda kinds: ", ".join(f"{name} {kind}" for name, kind in zip(NAMES, kinds))
)
NUMBERS = (
    *("0", "7", "-7", "32767", "32768", "-2147483649", "9223372036854775807", "9223372036854775808", "1709208000"),
    *("0.1", "1.5", "1.10", "-2.675", "1e3", "1E-3", "5e-324", "1e400", "-1e400", "1e39", "99999999.995", "0.000005"),
    *(
        "9" * 38,
        "9" * 39,
        "0." + "1" * 50,
        "1" * 30 + "." + "5" * 30,
        "1.00000017881393432617187499",
        "NaN",
        "-Infinity",
    ),
)
STRINGS = (
    *("", "x", "NaN", "-INF", "Infinity", "1", "1.5", "true", "AAEC", "AA==", "AAE", "-_-_", "é\u2028"),
    *("1,234.005", "+1", "1.", ".5", "1_0", " 1", "1e2", "١٢"),
)
TEXTS = [json.dumps(text, ensure_ascii=False) for text in (*STRINGS, *TIMES)]
SCALARS = (*NUMBERS, *TEXTS, '"\\ud83d\\ude00"', "true", "false", "null", "[]", "{}")


def written(items, opening, closing):
    comma = st.sampled_from([",", ", ", " ,\n"])
    return st.tuples(items, comma).map(lambda chosen: opening + chosen[1].join(chosen[0]) + closing)


def objects(values, **size):
    members = st.lists(st.tuples(st.sampled_from(NAMES), values), unique_by=lambda member: member[0], **size)
    return written(members.map(lambda found: [f'"{name}": {text}' for name, text in found]), "{", "}")


VALUES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: written(st.lists(inner, max_size=2), "[", "]") | objects(inner, max_size=2),
    max_leaves=4,
)
BROKEN = st.sampled_from(['{"a":1', "{'a", '{"a":01}', '{"a":1.}', '{"a":tru}', '{"z":"\t"}', '{"a":1,}', "7", "null"])
DOCUMENTS = st.one_of(*[objects(VALUES, min_size=1, max_size=2)] * 9, BROKEN)


def drawn(strategy, count):
    """So many examples of a strategy."""
    found = []

    @settings(max_examples=count, phases=[Phase.generate], database=None)
    @given(strategy)
    def draw(example):
        found.append(example)

    draw()
    return list(dict.fromkeys(found))


def from_json(spark, documents, schemas):
    """Of each schema what Spark makes of the documents; ``None`` for those that it calls corrupt."""
    frame = spark.createDataFrame([(document,) for document in documents], "document STRING")
    options = {"columnNameOfCorruptRecord": CORRUPT, "timeZone": "UTC"}
    parsed = [f.from_json("document", f"{ddl}, {CORRUPT} STRING", options) for ddl in schemas]
    kinds = [struct_type(f"{ddl}, {CORRUPT} STRING") for ddl in schemas]
    plain = [as_json(column, kind) for column, kind in zip(parsed, kinds)]
    rows = frame.select(*(column.alias(f"s{place}") for place, column in enumerate(plain))).toArrow()
    return [[taken(row) for row in rows.column(place).to_pylist()] for place in range(len(schemas))]


def as_json(value, kind):
    """The same with JSON for each VARIANT, which Arrow cannot pass within what is null."""
    if isinstance(kind, VariantType):
        return f.to_json(value)
    if not has_variant(kind):
        return value
    if isinstance(kind, ArrayType):
        return f.transform(value, lambda item: as_json(item, kind.elementType))
    if isinstance(kind, MapType):
        return f.transform_values(value, lambda key, item: as_json(item, kind.valueType))
    fields = [as_json(value[column.name], column.dataType).alias(column.name) for column in kind.fields]
    return f.when(value.isNotNull(), f.struct(*fields))


def taken(row):
    return None if row is None or row.pop(CORRUPT) is not None else row


def ours(documents, ddl):
    """The same of ours; ``None`` for dead letters."""
    wanted = arrow_schema(struct_type(ddl))
    decoded = Json(ddl).decode(pa.array(documents, pa.binary()), wanted)
    columns = [column.to_pylist() for column in decoded.columns]
    rows = [dict(zip(wanted.names, values)) for values in zip(*columns)]
    return [None if error else row for row, error in zip(rows, decoded.errors.to_pylist())]


def alike(mine, theirs):
    if isinstance(theirs, str):
        return mine == theirs or normal(mine) == normal(theirs)
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(alike(mine[name], theirs[name]) for name in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    return mine == theirs or (isinstance(theirs, float) and math.isnan(theirs) and math.isnan(mine))


def normal(text):
    """What JSON says, however it is written; Spark has names in quotes where there is no number."""

    def plain(value):
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [plain(inner) for inner in value]
        return {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}.get(value, value)

    try:
        return plain(json.loads(text, parse_int=number, parse_float=number, parse_constant=number))
    except ValueError:
        return text


def number(text):
    return repr(float(text))


# Of DIFFERENCES, what many documents have: the type in the schema, and what is in the document.
SKIPPED = (("VARIANT", r"NaN|Infinity"),)


def test_values_are_those_of_from_json(spark):
    """Each value in a column of each type, and what is made of them."""
    schemas = [*(f"a {kind}" for kind in sorted({*LEAVES})), *drawn(SCHEMAS, examples(6))]
    documents = [*(f'{{"a": {value}}}' for value in SCALARS), *drawn(DOCUMENTS, examples(250))]
    payloads = [document.encode() for document in documents]
    compared = 0
    for ddl, theirs in zip(schemas, from_json(spark, documents, schemas)):
        for document, mine, their in zip(documents, ours(payloads, ddl), theirs):
            if any(kind in ddl and re.search(pattern, document) for kind, pattern in SKIPPED):
                continue
            told = f"{ddl}\n{document}\nours: {mine}\nfrom_json: {their}"
            assert mine is None or (their is not None and alike(mine, their)), told
            compared += mine is not None and any(value is not None for value in mine.values())
    assert compared > 500


# What it is, in the words of docs/payloads.md; the schema, the document, and as JSON what from_json makes of it, which
# Spark writes as the pattern says, and what we do. None: it is corrupt, or a dead letter.
DIFFERENCES = [
    ("the text is as it is written", "v STRING", b'{"v":{"a" : 1.10}}', r'\{"v":"\{\\"a\\":1.1\}"\}', '{"a" : 1.10}'),
    ("the text is as it is written", "v STRING", b'{"v":1e400}', r'\{"v":"\\"Infinity\\""\}', "1e400"),
    ("behind the object", "v INT", b'{"v":1} {"v":2}', r'\{"v":1\}', None),
    ("behind the object", "v INT", b'{"v":1} end', r'\{"v":1\}', None),
    ("single quotes", "v INT", b"{'v':1}", r'\{"v":1\}', None),
    ("`+INF`", "v DOUBLE", b'{"v":+INF}', r'\{"v":"Infinity"\}', None),
    ("is not UTF-8", "v STRING", b'{"v":"\xff"}', '\\{"v":"\N{REPLACEMENT CHARACTER}"\\}', None),
    ("from 128 to 255", "v TINYINT", b'{"v":200}', r'\{"v":-56\}', None),
    ("without a date", "v TIMESTAMP", b'{"v":"12:00"}', r'\{"v":".*T12:00:00.000Z"\}', None),
    ("1 to 9999", "v TIMESTAMP", b'{"v":1709208000000}', r'\{"v":"\+56132.*"\}', None),
    ("1 to 9999", "v DATE", b'{"v":"0000-01-01"}', r'\{"v":"0000-01-01"\}', None),
    ("a number of days since 1970", "v DATE", b'{"v":"20240229"}', r'\{"v":"\+57.*"\}', None),
    ("`GMT` behind a day", "v TIMESTAMP", b'{"v":"2024-02-29GMT"}', r'\{"v":"2024-02-29T00:00:00.000Z"\}', None),
    ("1 to 9999", "v TIMESTAMP", b'{"v":9223372036854775807}', r'\{"v":"1969-12-31T23:59:59.000Z"\}', None),
    ("more than 18 hours", "v TIMESTAMP", b'{"v":"2024-02-29T12:00:00+19"}', None, "2024-02-28 17:00:00+00:00"),
    ("behind minutes", "v TIMESTAMP", b'{"v":"2024-02-29T12:00Z"}', None, "2024-02-29 12:00:00+00:00"),
    ("there twice", "v MAP<STRING, INT>", b'{"v":{"a":1,"a":2}}', r'\{"v":\{"a":1,"a":2\}\}', None),
    ("that is `NOT NULL`", "v INT NOT NULL", b"{}", r"\{\}", None),
    ("a key twice, `NaN`", "v VARIANT", b'{"v":NaN}', ANY, None),
    ("more than 1,000 digits", "v INT", b'{"v":1,"x":' + b"1" * 1001 + b"}", None, 1),
    ("more than 1,000 levels", "v INT", b'{"v":1,"x":' + b"[" * 1001 + b"]" * 1001 + b"}", None, 1),
    ("500 levels", "v VARIANT", b'{"v":' + b"[" * 501 + b"]" * 501 + b"}", ANY, None),
    ("comma, a sign", "v DECIMAL(10,2)", b'{"v":"12,50"}', r'\{"v":1250.00\}', None),
    ("more digits", "v DECIMAL(10,2)", b'{"v":9.999}', r'\{"v":10.00\}', None),
    ("more than 6 digits", "v TIMESTAMP", b'{"v":"2024-02-29T12:00:00.1234567Z"}', r'\{"v":".*12:00:00.123Z"\}', None),
    ("the day of a time", "v DATE", b'{"v":"2024-02-29T12:00:00Z"}', r'\{"v":"2024-02-29"\}', None),
    ("larger ones", "v DOUBLE", b'{"v":1e400}', r'\{"v":"Infinity"\}', None),
    ("cannot hold exactly", "v DOUBLE", b'{"v":9007199254740993}', r'\{"v":9.007199254740992E15\}', None),
    ("white space", "v INT", b'\x0b{"v":1}', None, 1),
]


def test_each_difference_is_one(spark):
    frame = spark.createDataFrame([(document,) for _, _, document, _, _ in DIFFERENCES], "document BINARY")
    options = {"columnNameOfCorruptRecord": CORRUPT, "timeZone": "UTC"}
    text = f.expr("CAST(document AS STRING)")
    parsed = [f.from_json(text, f"{ddl}, {CORRUPT} STRING", options) for _, ddl, *_ in DIFFERENCES]
    found = frame.select(
        *(
            f.when(column[CORRUPT].isNull(), f.to_json(f.struct(column["v"]), {"timeZone": "UTC"})).alias(f"d{place}")
            for place, column in enumerate(parsed)
        )
    ).collect()
    page = " ".join((ROOT / "docs" / "payloads.md").read_text().split())
    for place, (what, ddl, document, theirs, mine) in enumerate(DIFFERENCES):
        assert what in page
        told = found[place][place]
        assert (told is None) == (theirs is None), what
        assert theirs is None or re.fullmatch(theirs, told), f"{what}: {told}"
        (row,) = ours([document], ddl)
        assert (row and row["v"]) == mine or str(row["v"]) == mine, what
