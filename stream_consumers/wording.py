"""Numbers with their nouns, for people."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """The number with its noun.

    Args:
        count: the number.
        noun: in the singular.
        plural: of the noun, where it is not the noun with an "s".

    Example:
        >>> counted(1, "shard"), counted(0, "dead letter"), counted(2, "entry", "entries")
        ('1 shard', '0 dead letters', '2 entries')
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
