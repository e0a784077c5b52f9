"""Dates and times as text.

``yyyy-[m]m-[d]d[( |T)[h]h[:[m]m[:[s]s[.fraction]]][ ][zone]]``. Of the fraction no digit but 0 may follow the sixth,
since times have microseconds. A zone is an offset, ``UTC``, ``GMT`` or ``UT`` with or without one, or a name like
``Europe/Paris``. Text that says several times, or none, is refused: what a clock shows twice, or never, and short names
of zones, which mean several places.
"""

from __future__ import annotations

import functools
import re
from datetime import date, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo, available_timezones

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MOMENT = re.compile(
    r"([0-9]{4,6})-([0-9]{1,2})-([0-9]{1,2})(?:[ T]([0-9]{1,2})(?::([0-9]{1,2})(?::([0-9]{1,2})"
    r"(?:\.([0-9]{1,6})0*)?)?)?(?: ?([^0-9 ].*))?)?",
    re.DOTALL,
)
_DAY = re.compile(r"([0-9]{4,7})-([0-9]{1,2})-([0-9]{1,2})")
_OFFSET = re.compile(r"([+-])(?:([0-9]{1,2})(?::([0-9]{1,2})|:([0-9]{2}):([0-9]{2}))?|([0-9]{2})([0-9]{2})([0-9]{2})?)")
_PREFIXED = re.compile(r"(?:UTC|GMT|UT)(?=[+-]|\Z)")
# In the database of zones, but not in Java's.
_NO_REGIONS = re.compile(r"posix/|right/|(?:localtime|posixrules|Factory)\Z")
_FARTHEST = timedelta(hours=24)


def read_moment(text: str) -> datetime:
    """The time that text says, in UTC, which is also the zone of text without one.

    Args:
        text: see the module.

    Raises:
        ValueError: it says none.
        OverflowError: one that is not of the years 1 to 9999.

    Example:
        >>> print(read_moment("2024-02-29T12:00:00.123456000 Europe/Paris"))
        2024-02-29 11:00:00.123456+00:00
    """
    found, zone = _moment(text)
    offset = zone.utcoffset(found) if zone is not None else None
    if zone is not None and zone.utcoffset(found.replace(fold=1)) != offset:
        raise ValueError("a clock of this zone shows it twice, or never")
    return (found - offset if offset else found).replace(tzinfo=timezone.utc)


def read_local_moment(text: str) -> datetime:
    """The time that text without a zone says.

    Raises:
        ValueError: it says none, or has a zone.
        OverflowError: one that is not of the years 1 to 9999.

    Example:
        >>> print(read_local_moment("2024-02-29 12:00"))
        2024-02-29 12:00:00
    """
    found, zone = _moment(text)
    if zone is not None:
        raise ValueError("it has a zone")
    return found


def _moment(text: str) -> tuple[datetime, tzinfo | None]:
    match = _MOMENT.fullmatch(text)
    if match is None:
        raise ValueError("no time")
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    found = datetime(  # noqa: DTZ001 - of which zone is for the caller to say
        _year(year),
        int(month),
        int(day),
        int(hour or 0),
        int(minute or 0),
        int(second or 0),
        int(fraction.ljust(6, "0")) if fraction else 0,
    )
    return found, None if zone is None else _zone(zone)


def read_day(text: str) -> date:
    """The day that text says.

    Raises:
        ValueError: it says none, or more than a day.
        OverflowError: one that is not of the years 1 to 9999.

    Example:
        >>> print(read_day("2024-2-29"))
        2024-02-29
    """
    match = _DAY.fullmatch(text)
    if match is None:
        raise ValueError("no day")
    year, month, day = match.groups()
    return date(_year(year), int(month), int(day))


def read_epoch_seconds(digits: str) -> datetime:
    """The time that is so many seconds after 1970 began, in UTC.

    Raises:
        OverflowError: it is not of the years 1 to 9999.

    Example:
        >>> print(read_epoch_seconds("1709208000"))
        2024-02-29 12:00:00+00:00
    """
    if len(digits) > 13:
        raise OverflowError(digits)
    return EPOCH + timedelta(seconds=int(digits))


def _year(digits: str) -> int:
    year = int(digits)
    if not 1 <= year <= 9999:
        raise OverflowError(digits)
    return year


@functools.lru_cache(maxsize=1024)
def _zone(name: str) -> tzinfo:
    if name == "Z" or _PREFIXED.fullmatch(name):
        return timezone.utc
    if offset := _OFFSET.fullmatch(_PREFIXED.sub("", name, count=1)):
        sign, *parts = offset.groups()
        hours, minutes, seconds = (int(next((parts[i] for i in places if parts[i]), 0)) for places in _PLACES)
        distance = timedelta(hours=hours, minutes=minutes, seconds=seconds)
        if minutes > 59 or seconds > 59 or distance >= _FARTHEST:
            raise ValueError("no zone")
        return timezone(-distance if sign == "-" else distance)
    if name not in _regions():
        raise ValueError("no zone")
    return ZoneInfo(name)


@functools.cache
def _regions() -> frozenset[str]:
    """The names of zones; of others, which a message may hold, none is looked up as a file or a module."""
    return frozenset(name for name in available_timezones() if not _NO_REGIONS.match(name))


# Where the groups of _OFFSET have hours, minutes and seconds.
_PLACES = ((0, 4), (1, 2, 5), (3, 6))
