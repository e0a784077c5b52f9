"""Numbers with their nouns, for people."""


def counted(count: int, noun: str) -> str:
    """The number with its noun.

    Example:
        >>> counted(1, "shard"), counted(0, "dead letter")
        ('1 shard', '0 dead letters')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
