"""Whether Spark reads every split to its end to make some rows: only then does the end of each read say anything.

``where("false")`` needs no read at all, ``limit`` stops it, and a join with an empty table leaves the other side.
"""

from __future__ import annotations

import re

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from spark_jobs.reading.rejection import REJECTED

# One row after the other, each of them, and from one child. Whatever is not named here may do something else.
_EACH_ROW = re.compile(r"Project \[|Filter |(Batch|Arrow)EvalPython \[|Generate (explode|posexplode|inline|stack)\(")
# As :func:`spark_jobs.reading.source.read_splits` makes them.
_READ = (re.compile(r"MapInArrow stream_assets_splits\("), re.compile(r"Range \("))
_BRANCHES = re.compile(r"^[\s:+\-]*")
_SECTIONS = ("Parsed Logical Plan", "Analyzed Logical Plan", "Optimized Logical Plan", "Physical Plan")
# A condition on the time may come out otherwise when the plan is made once more, for the write.
_TIME = re.compile(r"now|today|tomorrow|yesterday|curdate|current_|localtime|more fields", re.IGNORECASE)
# The condition under which a row is rejected drops none: it fails the read, or lets the row pass.
_DROPS_ROWS = re.compile(rf"\b(?:Filter|Generate)\b(?!.*{re.escape(REJECTED)})")


def reads_everything(rows: DataFrame) -> bool:
    """Whether these rows, made of one frame of :func:`spark_jobs.reading.source.read_splits`, take a read of all of it.

    ``False`` where that cannot be told.
    """
    try:
        text = str(rows.sparkSession.sql("EXPLAIN EXTENDED SELECT * FROM {rows}", rows=rows).collect()[0][0])
    except PySparkException:
        return False
    return plan_reads_everything(text)


def plan_reads_everything(explained: str) -> bool:
    r"""The same, by what ``EXPLAIN EXTENDED`` says.

    Example:
        >>> read = "+- MapInArrow stream_assets_splits(id#0L)#9, [id#1L, _stream#2], false\n   +- Range (0, 2, step=1)"
        >>> optimized = f"Filter (id#1L > 3)\n{read}"
        >>> explained = "== Parsed Logical Plan ==\n== Analyzed Logical Plan ==\n== Optimized Logical Plan ==\n{}"
        >>> plan_reads_everything(explained.format(f"{optimized}\n\n== Physical Plan ==\n"))
        True
        >>> plan_reads_everything(explained.format("LocalRelation <empty>, [id#1L]\n\n== Physical Plan ==\n"))
        False
    """
    headings = [f"== {section} ==" for section in _SECTIONS]
    # A text that stands in the transform may look like anything.
    if any(explained.count(heading) != 1 for heading in headings):
        return False
    analyzed, _, rest = explained.partition(headings[1])[2].partition(headings[2])
    if _TIME.search(analyzed) and _DROPS_ROWS.search(analyzed):
        return False
    lines = [_BRANCHES.sub("", line) for line in rest.partition(headings[3])[0].split("\n")]
    nodes = [line for line in lines if line]
    *others, made, numbers = ["", "", *nodes]
    is_read = all(pattern.match(node) for pattern, node in zip(_READ, (made, numbers)))
    return is_read and all(_EACH_ROW.match(node) for node in others if node)
