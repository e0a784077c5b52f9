"""The error tree: one root class, and leaf classes that say whether a retry can succeed.

Every message has three parts: what happened, the numbers, and the remedy. Code decides on a retry with
``isinstance(error, Transient)``, never by reading the message. All errors can be pickled, because they cross process
boundaries (Spark workers, Dagster steps).
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from stream_consumers.display import ELLIPSIS, printable_lines

MAX_PART_CHARACTERS = 4_000
"""The longest shown description, remedy and fact of an error, in characters."""


class StreamAssetsError(Exception):
    """The root of every error that this project raises deliberately.

    Args:
        what: what happened, including the name of the object (path, URL, option).
        remedy: what the user should do.
        facts: the numbers of the error, shown as ``name=value`` and stored in :attr:`facts`.

    The text of an error reaches logs and Dagster, so it contains no values of messages. Text that may contain such
    values, for example an error message of Spark or of a user's function, is stored in :attr:`detail`, which only
    :meth:`revealed` shows. The text may contain names from schemas and replies from servers, so terminal control
    characters are escaped, and each part has a length limit.

    Example:
        >>> str(StreamAssetsError("orders.ss ends early", remedy="Run again when it has grown.", offset=12))
        'orders.ss ends early (offset=12). Run again when it has grown.'
    """

    def __init__(self, what: str, *, remedy: str, **facts: object) -> None:
        self.what = _shown(what)
        self.remedy = _shown(remedy)
        super().__init__(self.what)
        self.facts: Mapping[str, object] = facts
        self.detail = ""

    def __str__(self) -> str:
        numbers = ", ".join(f"{name}={_shown(str(value))}" for name, value in self.facts.items())
        # A message from a client library often ends with a period.
        return f"{self.what.rstrip('.')}{f' ({numbers})' if numbers else ''}. {self.remedy}"

    def revealed(self) -> StreamAssetsError:
        """Return the same error with its detail in the text.

        Example:
            >>> error = StreamAssetsError("the transform raised ValueError", remedy="Correct it.")
            >>> error.detail = "no user 4111"
            >>> str(error)
            'the transform raised ValueError. Correct it.'
            >>> str(error.revealed())
            'the transform raised ValueError: no user 4111. Correct it.'
        """
        if not self.detail:
            return self
        return type(self)(f"{self.what}: {self.detail}", remedy=self.remedy, **self.facts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.remedy, dict(self.facts))


def described(error: BaseException) -> str:
    r"""Describe the error of a function of the user without values of messages, which its text may contain.

    Example:
        >>> described(ValueError("no user 4111"))
        'ValueError'
        >>> described(UnicodeDecodeError("utf-8", b"4111 \xe9", 5, 6, "unexpected end of data"))
        'UnicodeDecodeError: unexpected end of data at 5'
    """
    said = error.what if isinstance(error, StreamAssetsError) else ""
    if isinstance(error, (UnicodeDecodeError, UnicodeEncodeError)):
        said = f"{error.reason} at {error.start}"
    return f"{type(error).__name__}{said and ': '}{said}"


def place_of(error: BaseException, *, library: str = "") -> str:
    """Name the file and the line in which an error was raised; code that was compiled from text has none.

    Args:
        error: the error of a function of the user.
        library: the folder of a library; what the function calls in it is not the place.

    Example:
        >>> place_of(ValueError())
        ''
    """
    raised = traceback.extract_tb(error.__traceback__)
    frames = list(takewhile(lambda one: not library or not one.filename.startswith(library), raised))
    frames = [one for one in frames if Path(one.filename).is_file()]
    return f" in line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""


def log_text(error: BaseException) -> str:
    """Describe any error for a log: one of this project by its text, another one by its type and where it was raised.

    Example:
        >>> log_text(ValueError("no user 4111")), log_text(StreamAssetsError("no stream", remedy="Create it."))
        ('ValueError', 'no stream. Create it.')
    """
    return str(error) if isinstance(error, StreamAssetsError) else f"{described(error)}{place_of(error)}"


def _shown(text: str) -> str:
    if len(text) > MAX_PART_CHARACTERS:
        # In a long text, the long part is a value in the middle of the sentence.
        text = f"{text[: MAX_PART_CHARACTERS // 2]}{ELLIPSIS}{text[-MAX_PART_CHARACTERS // 2 + 1 :]}"
    return printable_lines(text)


def _rebuild(kind: type[StreamAssetsError], what: str, remedy: str, facts: dict[str, object]) -> StreamAssetsError:
    return kind(what, remedy=remedy, **facts)


class Terminal:
    """A mixin for errors that a retry cannot resolve.

    Example:
        >>> issubclass(InvalidUrlError, Terminal)
        True
    """


class Transient:
    """A mixin for errors that a retry may resolve.

    Example:
        >>> issubclass(BrokerUnavailableError, Transient)
        True
    """


class InvalidUrlError(StreamAssetsError, Terminal):
    """A stream URL that does not parse."""


class InvalidStreamKeyError(InvalidUrlError):
    """A stream key outside ``[a-zA-Z0-9._-]`` or longer than 249 bytes."""


class InvalidOptionError(StreamAssetsError, Terminal):
    """An option or an argument is unknown, has the wrong type, is out of range, or conflicts with another one."""


class UnsupportedError(StreamAssetsError, Terminal):
    """The backend does not support the operation."""


class StreamNotFoundError(StreamAssetsError, Terminal):
    """The file, topic or key does not exist."""


class StreamExistsError(StreamAssetsError, Terminal):
    """The file exists although it must not."""


class FormatError(StreamAssetsError, Terminal):
    """The bytes do not have the expected format."""


class UnsupportedVersionError(FormatError):
    """The format is valid, but this release cannot read its newer version."""


class TruncatedTailError(FormatError):
    """The stream ends in the middle of a message, and no producer is writing the rest."""


class ProducerBusyError(StreamAssetsError, Transient):
    """Another producer has the file open for writing."""


class ProducerEndedError(StreamAssetsError, Terminal):
    """A message was sent after the producer had ended."""


class SizeLimitError(StreamAssetsError, Terminal):
    """A file or a message would exceed its size limit."""


class StreamEndedError(StreamAssetsError, Terminal):
    """The stream has an end, and it was reached."""


class StreamRemovedError(StreamAssetsError, Terminal):
    """The stream was removed or truncated while it was being read."""


class OutOfBoundsError(StreamAssetsError, Terminal):
    """A seek or rewind has a target that the stream does not have."""


class NotSubscribedError(StreamAssetsError, Terminal):
    """The consumer does not read the stream or shard."""


class DataLossError(StreamAssetsError, Terminal):
    """Messages that should be read no longer exist."""


class BatchTooLargeError(StreamAssetsError, Transient):
    """A batch whose size was estimated exceeds its limit of bytes; its next plan counts them exactly."""


class SourceRecreatedError(DataLossError):
    """The stream is not the one that the ledger has positions of."""


class SourceTruncatedError(SourceRecreatedError):
    """The stream lost its newest messages after they were read: it ends before them, or holds others in their place."""


class TableUnreadableError(StreamAssetsError, Terminal):
    """The path exists, but no Delta table can be read from it."""


class LedgerUnreadableError(StreamAssetsError, Transient):
    """The Delta log could not be read when it was needed; nothing was committed without it."""


class RestoreTargetError(StreamAssetsError, Terminal):
    """The positions after a RESTORE are unknown, because it does not name the version that it restored."""


class LedgerTruncatedError(StreamAssetsError, Terminal):
    """The Delta log was cleaned up so far that the positions cannot be determined."""


class ForeignCommitError(StreamAssetsError, Terminal):
    """Another program writes under this group's transaction app id."""


class UntrustedFileError(StreamAssetsError, Terminal):
    """A file is not the expected one, or another user could change code or read messages in it."""


class UnsafeStorageError(StreamAssetsError, Terminal):
    """Two drivers that write the table at the same time could overwrite each other's commits."""


class StorageMismatchError(StreamAssetsError, Terminal):
    """Spark and this process see different storage at the table's location, or the table was replaced while in use."""


class ConstraintViolatedError(StreamAssetsError, Terminal):
    """A row breaks a CHECK or NOT NULL constraint of the table."""


class SchemaMismatchError(StreamAssetsError, Terminal):
    """The rows do not fit the table, or the declared schema cannot be used."""


class TransformError(StreamAssetsError, Terminal):
    """The user's transform raised."""


class KeyConflictError(StreamAssetsError, Terminal):
    """It is unknown which of two changes of a key is the newer one."""


class DecoderCrashedError(StreamAssetsError, Terminal):
    """A decoder crashes its process, or exhausts its memory, for too many messages."""


class CatalogUnavailableError(StreamAssetsError, Transient):
    """The catalog that resolves the location or the name of a table does not answer."""


class SparkSessionError(StreamAssetsError, Terminal):
    """The Spark session cannot write Delta tables or read stream sources."""


class SparkEndedError(StreamAssetsError, Transient):
    """The Spark session of a run has ended; this run cannot continue, and the next run starts another session."""


class WriteError(StreamAssetsError, Transient):
    """Spark failed to write a batch; nothing of it is in the table."""


class BrokerUnavailableError(StreamAssetsError, Transient):
    """The broker does not answer."""


class BrokerError(StreamAssetsError, Transient):
    """The broker answered with an error."""


class AccessDeniedError(StreamAssetsError, Terminal):
    """The broker, the storage of a table, or a schema registry denies access or the operation."""


class TokenProviderError(StreamAssetsError, Transient):
    """The function that creates tokens for a broker failed, or returned an invalid token."""


class GroupActiveError(StreamAssetsError, Transient):
    """The group has live members of other programs, so its positions cannot be set."""


class GroupNotFoundError(StreamAssetsError, Terminal):
    """A required consumer group does not exist."""


class GroupRemovedError(StreamAssetsError, Terminal):
    """A consumer group was removed, alone or with its stream, while a member was reading."""


class DeliverySettledError(StreamAssetsError, Terminal):
    """A delivery was acknowledged, rejected or returned a second time."""


class ShutdownTimeoutError(StreamAssetsError, Transient):
    """Handlers were still running when the shutdown timeout passed; their messages stay pending."""


class GroupsNotRememberedError(StreamAssetsError, Terminal):
    """No broker stores positions of groups for this stream."""


class ProducerFencedError(StreamAssetsError, Terminal):
    """Another producer has taken over the transactional id."""


class TransactionAbortedError(StreamAssetsError, Transient):
    """A transaction was aborted: neither its messages nor its positions take effect."""


class MissingDependencyError(StreamAssetsError, Terminal):
    """A required tool (Java, a jar) is not installed on this machine."""


class SchemaRegistryError(StreamAssetsError, Transient):
    """The schema registry does not answer for now, or this machine cannot read its schema for now."""


class SchemaNotFoundError(StreamAssetsError, Terminal):
    """The schema registry does not have the schema or the subject."""


class BackendLoadError(StreamAssetsError, Terminal):
    """A package registers a backend for a URL scheme, and the backend cannot be used."""
