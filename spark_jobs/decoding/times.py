"""Dates and times as Spark reads them from text.

``[+-]yyyy[-[m]m[-[d]d[( |T)[h]h[:[m]m[:[s]s[.fraction][zone]]]]]]``: of the fraction the first six digits count, and a
zone is an offset, ``UTC``, ``GMT`` or ``UT`` with or without one, a name like ``Europe/Paris``, or a short one of Java.
What Spark gives for a time without a date depends on the day on which it looks, so there is none here.
"""

from __future__ import annotations

import functools
import re
from contextlib import suppress
from datetime import date, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
# Spark drops them at both ends.
_TRIMMED = "".join(map(chr, (*range(0x21), 0x7F)))
_MOMENT = re.compile(
    r"([+-]?[0-9]{4,6})(?:-([0-9]{1,2})(?:-([0-9]{1,2})(?:[ T]([0-9]{1,2})(?::([0-9]{1,2})(?::([0-9]{1,2})"
    r"(?:\.([0-9]*))?([^0-9].*)?)?)?)?)?)?",
    re.DOTALL,
)
# As most are written; for these there is a faster way.
_USUAL = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.([0-9]*))?([^0-9].*)?", re.DOTALL)
_DAY = re.compile(r"([+-]?[0-9]{4,7})(?:-([0-9]{1,2})(?:-([0-9]{1,2})(?:[ T].*)?)?)?", re.DOTALL)
_OFFSET = re.compile(r"([+-])(?:([0-9]{1,2})(?::([0-9]{1,2})|:([0-9]{2}):([0-9]{2}))?|([0-9]{2})([0-9]{2})([0-9]{2})?)")
_PREFIXED = re.compile(r"(?:UTC|GMT|UT)(?=[+-]|\Z)")
_REGION = re.compile(r"[A-Za-z][A-Za-z0-9~/._+-]+")
# In the database of zones, but not in Java's.
_NO_REGIONS = re.compile(r"posix/|right/|(?:localtime|posixrules|Factory)\Z")
_FARTHEST = timedelta(hours=18)
# Java's ZoneId.SHORT_IDS; text of them is not clear, but this is what Spark makes of it.
_SHORT_NAMES = {
    **{"ACT": "Australia/Darwin", "AET": "Australia/Sydney", "AGT": "America/Argentina/Buenos_Aires"},
    **{"ART": "Africa/Cairo", "AST": "America/Anchorage", "BET": "America/Sao_Paulo", "BST": "Asia/Dhaka"},
    **{"CAT": "Africa/Harare", "CNT": "America/St_Johns", "CST": "America/Chicago", "CTT": "Asia/Shanghai"},
    **{"EAT": "Africa/Addis_Ababa", "ECT": "Europe/Paris", "IET": "America/Indiana/Indianapolis"},
    **{"IST": "Asia/Kolkata", "JST": "Asia/Tokyo", "MIT": "Pacific/Apia", "NET": "Asia/Yerevan"},
    **{"NST": "Pacific/Auckland", "PLT": "Asia/Karachi", "PNT": "America/Phoenix", "PRT": "America/Puerto_Rico"},
    **{"PST": "America/Los_Angeles", "SST": "Pacific/Guadalcanal", "VST": "Asia/Ho_Chi_Minh"},
    **{"EST": "-05:00", "MST": "-07:00", "HST": "-10:00"},
}


def read_moment(text: str) -> datetime:
    """The time that text says, in UTC, which is also the zone of text without one.

    Args:
        text: see the module.

    Raises:
        ValueError: it says none.
        OverflowError: one that is not of the years 1 to 9999.

    Example:
        >>> print(read_moment("2024-02-29T12:00:00.123456789 Europe/Paris"))
        2024-02-29 11:00:00.123456+00:00
    """
    found, zone = _moment(text)
    # As Java has it: what is there twice in autumn is the first, what spring leaves out is an hour later.
    offset = zone.utcoffset(found) if zone is not None and zone is not timezone.utc else None
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
    text = text.strip(_TRIMMED)
    if usual := _USUAL.fullmatch(text):
        # The year 0 is for below.
        with suppress(ValueError):
            found = datetime.fromisoformat(text[:19])
            fraction, zone = usual.groups()
            if fraction:
                found = found.replace(microsecond=int(fraction[:6].ljust(6, "0")))
            return found, None if zone is None else _zone(zone.strip(_TRIMMED))
    match = _MOMENT.fullmatch(text)
    if match is None:
        raise ValueError("no time")
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    found = datetime(  # noqa: DTZ001 - of which zone is for the caller to say
        _year(year),
        int(month or 1),
        int(day or 1),
        int(hour or 0),
        int(minute or 0),
        int(second or 0),
        int(fraction[:6].ljust(6, "0")) if fraction else 0,
    )
    return found, None if zone is None else _zone(zone.strip(_TRIMMED))


def read_day(text: str) -> date:
    """The day that text says; of a time the day in its own zone, whatever follows the day.

    Raises:
        ValueError: it says none.
        OverflowError: one that is not of the years 1 to 9999.

    Example:
        >>> print(read_day("2024-02-29T23:59:59-08:00"))
        2024-02-29
    """
    match = _DAY.fullmatch(text.strip(_TRIMMED))
    if match is None:
        raise ValueError("no day")
    year, month, day = match.groups()
    return date(_year(year), int(month or 1), int(day or 1))


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
    name = _SHORT_NAMES.get(name, name)
    if name == "Z" or _PREFIXED.fullmatch(name):
        return timezone.utc
    if offset := _OFFSET.fullmatch(_PREFIXED.sub("", name, count=1)):
        sign, *parts = offset.groups()
        hours, minutes, seconds = (int(next((parts[i] for i in places if parts[i]), 0)) for places in _PLACES)
        distance = timedelta(hours=hours, minutes=minutes, seconds=seconds)
        if minutes > 59 or seconds > 59 or distance > _FARTHEST:
            raise ValueError("no zone")
        return timezone(-distance if sign == "-" else distance)
    if not _REGION.fullmatch(name) or _NO_REGIONS.match(name):
        raise ValueError("no zone")
    try:
        return ZoneInfo(name)
    except (KeyError, OSError) as error:
        raise ValueError("no zone") from error


# Where the groups of _OFFSET have hours, minutes and seconds.
_PLACES = ((0, 4), (1, 2, 5), (3, 6))
