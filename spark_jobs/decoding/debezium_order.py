"""The place of a change in the log of its database, as text whose order is that of the log."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from spark_jobs.decoding.debezium_types import unfit
from spark_jobs.decoding.json_values import Integer

ORDER_FIELDS = (
    *("connector", "lsn", "sequence", "file", "pos", "row", "commit_lsn", "change_lsn", "event_serial_no"),
    *("scn", "commit_scn", "lcr_position", "rs_id", "ssn"),
)
"""The fields of ``source`` that decide the order."""
_DIGITS = 20
_PAIR = re.compile(r'\[(?:null|"([0-9]{1,20})"), ?(?:null|"([0-9]{1,20})")\]')
_BINLOG = re.compile(r".*\.([0-9]{1,20})", re.DOTALL)
_LSN = re.compile(r"[0-9a-f]{8}:[0-9a-f]{8}:[0-9a-f]{4}")
_SCN = re.compile(r"[0-9]{1,20}")
_MARK = re.compile(r"[0-9a-zA-Z.]{0,200}")
Source = Mapping[str, Any]


def source_order(source: Any) -> str:
    """The place of a change, from the ``source`` of its envelope.

    Args:
        source: numbers are ``int`` or as :func:`spark_jobs.decoding.json_values.scanner` leaves them.

    Raises:
        ValueError: names the field that is missing or of another type.

    Example:
        >>> source_order({"connector": "mysql", "file": "mysql-bin.000003", "pos": 484, "row": 1})
        '00000000000000000003/00000000000000000484/00000000000000000001'
    """
    if not isinstance(source, Mapping):
        raise ValueError("field 'source' is not an object, so that the change has no order")
    connector = source.get("connector")
    order = _ORDERS.get(connector) if isinstance(connector, str) else None
    if order is None:
        raise ValueError(
            f"field 'source.connector' is not one of {', '.join(_ORDERS)}, so that the change has no order"
        )
    return order(source)


def _postgres(source: Source) -> str:
    # Transactions are sent in the order of their commits, and a transaction may write before another one commits that
    # is sent first. So the commit before a change comes first; a snapshot has none.
    pair = _text(source, "sequence", _PAIR, is_optional=True)
    committed, own = pair.groups() if pair else (None, None)
    # Java has no unsigned numbers.
    lsn = own if own and source.get("lsn") is None else str(_number(source, "lsn") % 2**64)
    return f"{(committed or lsn).zfill(_DIGITS)}/{lsn.zfill(_DIGITS)}"


def _binlog(source: Source) -> str:
    file = _text(source, "file", _BINLOG)
    assert file is not None
    return "/".join([file[1].zfill(_DIGITS), _padded(source, "pos"), _padded(source, "row")])


def _sqlserver(source: Source) -> str:
    commit, change = _text(source, "commit_lsn", _LSN), _text(source, "change_lsn", _LSN, is_optional=True)
    assert commit is not None
    return "/".join([commit[0], change[0] if change else "", _padded(source, "event_serial_no", 0)])


def _oracle(source: Source) -> str:
    own = _text(source, "scn", _SCN)
    commit = _text(source, "commit_scn", _SCN, is_optional=True) or own
    assert own is not None
    assert commit is not None
    marks = [_text(source, name, _MARK, is_optional=True) for name in ("lcr_position", "rs_id")]
    shown = [mark[0] if mark else "" for mark in marks]
    return "/".join([commit[0].zfill(_DIGITS), own[0].zfill(_DIGITS), *shown, _padded(source, "ssn", 0)])


_ORDERS: Mapping[str, Callable[[Source], str]] = {
    "postgresql": _postgres,
    "mysql": _binlog,
    "mariadb": _binlog,
    "sqlserver": _sqlserver,
    "oracle": _oracle,
}


def _text(source: Source, name: str, form: re.Pattern[str], *, is_optional: bool = False) -> re.Match[str] | None:
    value = source.get(name)
    if value is None and is_optional:
        return None
    match = form.fullmatch(value.strip().lower()) if type(value) is str else None
    if match is None:
        raise _missing(name, "text of the form that Debezium writes", value)
    return match


def _number(source: Source, name: str, default: int | None = None) -> int:
    value = source.get(name)
    if value is None and default is not None:
        return default
    if type(value) is int or (type(value) is Integer and len(value) <= _DIGITS):
        return int(value)
    raise _missing(name, "a whole number of 64 bits", value)


def _padded(source: Source, name: str, default: int | None = None) -> str:
    number = _number(source, name, default)
    if number < 0:
        raise ValueError(f"field 'source.{name}' is below 0, so that the change has no order")
    return str(number).zfill(_DIGITS)


def _missing(name: str, wanted: str, value: Any) -> ValueError:
    if value is None:
        return ValueError(f"field 'source.{name}' is missing, so that the change has no order")
    return unfit(f"source.{name}", f"{wanted}, so that the change has no order", value)
