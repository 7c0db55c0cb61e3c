"""Times as text."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_text(seconds: float | None) -> str:
    """Seconds since the epoch as a time in UTC; empty for what is not a time.

    Example:
        >>> utc_text(60.0), utc_text(None), utc_text(1e30)
        ('1970-01-01 00:01:00Z', '', '')
    """
    if seconds is None:
        return ""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (OverflowError, ValueError, OSError):  # a number that is not a time
        return ""
