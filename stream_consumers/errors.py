"""The error tree: one root, and leaves that say whether trying again can help.

Every message has three parts: what happened, the numbers, and what to do. A runner decides on a retry with
``isinstance(error, Transient)``, never by reading the message. All of them survive pickling, because they cross
process boundaries (Spark workers, Dagster steps).
"""

from __future__ import annotations

from collections.abc import Mapping

from stream_consumers.display import ELLIPSIS, printable_lines

LONGEST_PART = 4_000
"""What happened, the remedy, and each fact have at most this many characters in the text of an error."""


class StreamAssetsError(Exception):
    """Root of every error raised on purpose by this project.

    Args:
        what: what happened, naming the thing (path, URL, option).
        remedy: what the reader should do about it.
        facts: the numbers that belong to it, shown as ``name=value`` and kept as attributes of :attr:`facts`.

    Its text reaches logs and Dagster, so that it holds no values of messages. What may hold some, such as the text of
    an error of Spark or of a user's function, is its :attr:`detail`, which is shown only by :meth:`revealed`. Names in
    schemas and what servers answer are part of it: what a terminal would obey is written as an escape, and each part
    has a length limit.

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
        # What a client library says often is a sentence already.
        return f"{self.what.rstrip('.')}{f' ({numbers})' if numbers else ''}. {self.remedy}"

    def revealed(self) -> StreamAssetsError:
        """The same error with its detail in its text.

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


def _shown(text: str) -> str:
    if len(text) > LONGEST_PART:
        # What is long is a value in the middle of a sentence.
        text = f"{text[: LONGEST_PART // 2]}{ELLIPSIS}{text[-LONGEST_PART // 2 + 1 :]}"
    return printable_lines(text)


def _rebuild(kind: type[StreamAssetsError], what: str, remedy: str, facts: dict[str, object]) -> StreamAssetsError:
    return kind(what, remedy=remedy, **facts)


class Terminal:
    """Mixed into errors that come back until something is changed.

    Example:
        >>> issubclass(InvalidUrlError, Terminal)
        True
    """


class Transient:
    """Mixed into errors that may be gone at the next try.

    Example:
        >>> issubclass(BrokerUnavailableError, Transient)
        True
    """


class InvalidUrlError(StreamAssetsError, Terminal):
    """A stream URL that does not parse."""


class InvalidStreamKeyError(InvalidUrlError):
    """A stream key outside ``[a-zA-Z0-9._-]`` or longer than 249 bytes."""


class InvalidOptionError(StreamAssetsError, Terminal):
    """An option or an argument that is unknown, of the wrong type, out of range, or at odds with another one."""


class UnsupportedError(StreamAssetsError, Terminal):
    """Something that this backend cannot do at all."""


class StreamNotFoundError(StreamAssetsError, Terminal):
    """The file, topic or key is not there."""


class StreamExistsError(StreamAssetsError, Terminal):
    """The file is there although it must not be."""


class FormatError(StreamAssetsError, Terminal):
    """The bytes are not in the format they should be in."""


class UnsupportedVersionError(FormatError):
    """The format is right, but its version is newer than this reader."""


class TruncatedTailError(FormatError):
    """The stream ends in the middle of a message, and no producer is writing the rest."""


class ProducerBusyError(StreamAssetsError, Transient):
    """Another producer has the file open for writing."""


class ProducerEndedError(StreamAssetsError, Terminal):
    """Something was sent after the producer had ended."""


class SizeLimitError(StreamAssetsError, Terminal):
    """A file, or a message, would be larger than its limit."""


class StreamEndedError(StreamAssetsError, Terminal):
    """The stream has an end, and it was reached."""


class StreamRemovedError(StreamAssetsError, Terminal):
    """The stream was removed or cut while it was being read."""


class OutOfBoundsError(StreamAssetsError, Terminal):
    """A seek or rewind to a place that the stream does not have."""


class NotSubscribedError(StreamAssetsError, Terminal):
    """A stream or shard that the consumer was not created for."""


class DataLossError(StreamAssetsError, Terminal):
    """Messages that should be read are not there any more."""


class BatchTooLargeError(StreamAssetsError, Transient):
    """A batch whose size was estimated holds more bytes than it may; the next plan of it counts them."""


class SourceRecreatedError(DataLossError):
    """The stream is another one than the ledger remembers."""


class SourceTruncatedError(SourceRecreatedError):
    """The stream lost its newest messages, which were read, and holds others in their place, or ends before them."""


class TableUnreadableError(StreamAssetsError, Terminal):
    """The path is there but no Delta table can be read from it."""


class LedgerUnreadableError(StreamAssetsError, Transient):
    """The Delta log could not be read when it had to be; nothing was committed on a guess."""


class LedgerTruncatedError(StreamAssetsError, Terminal):
    """The Delta log was cleaned so far that the positions in it cannot be known."""


class ForeignCommitError(StreamAssetsError, Terminal):
    """Another program writes under this group's transaction app id."""


class UntrustedFileError(StreamAssetsError, Terminal):
    """A file is not what it should be, or another user could change the code or read the messages in it."""


class UnsafeStorageError(StreamAssetsError, Terminal):
    """Two drivers that write the table at the same time could overwrite each other's commits."""


class StorageMismatchError(StreamAssetsError, Terminal):
    """Spark and this process see different storage where the table is, or it was replaced while it was in use."""


class ConstraintViolatedError(StreamAssetsError, Terminal):
    """A row breaks a CHECK or NOT NULL constraint of the table."""


class SchemaMismatchError(StreamAssetsError, Terminal):
    """The rows do not fit the table, or the declared schema cannot be used."""


class TransformError(StreamAssetsError, Terminal):
    """The user's transform raised."""


class DecoderCrashedError(StreamAssetsError, Terminal):
    """A decoder ends its process, or exhausts its memory, for too many messages."""


class CatalogUnavailableError(StreamAssetsError, Transient):
    """The catalog that knows where a table is, or what it is called, does not answer."""


class SparkSessionError(StreamAssetsError, Terminal):
    """The Spark session cannot write Delta tables or read stream sources."""


class SparkEndedError(StreamAssetsError, Transient):
    """The Spark of a run has ended: the next run gets another one, this one does not."""


class WriteError(StreamAssetsError, Transient):
    """Spark failed to write a batch; nothing of it is in the table."""


class BrokerUnavailableError(StreamAssetsError, Transient):
    """The broker does not answer."""


class BrokerError(StreamAssetsError, Transient):
    """The broker answered with an error."""


class AccessDeniedError(StreamAssetsError, Terminal):
    """The broker, the storage of a table, or a schema registry does not let us in, or not do that."""


class TokenProviderError(StreamAssetsError, Transient):
    """The function that makes tokens for a broker failed, or returned no valid token."""


class GroupActiveError(StreamAssetsError, Transient):
    """The group has live members that are not ours, so that its positions cannot be set from outside."""


class GroupNotFoundError(StreamAssetsError, Terminal):
    """A consumer group that was to be there is not."""


class GroupRemovedError(StreamAssetsError, Terminal):
    """A consumer group was removed, alone or with its stream, while a member was reading."""


class DeliverySettledError(StreamAssetsError, Terminal):
    """A delivery was acknowledged, rejected or given back a second time."""


class ShutdownTimeoutError(StreamAssetsError, Transient):
    """Handlers were still running when the time to close was over; what they work on stays pending."""


class GroupsNotRememberedError(StreamAssetsError, Terminal):
    """No broker remembers the positions of groups for this stream."""


class ProducerFencedError(StreamAssetsError, Terminal):
    """Another producer has taken over the transactional id."""


class TransactionAbortedError(StreamAssetsError, Transient):
    """A transaction was given up: neither its messages nor its positions count."""


class MissingDependencyError(StreamAssetsError, Terminal):
    """A tool that is needed (Java, a jar) is not on this machine."""


class SchemaRegistryError(StreamAssetsError, Transient):
    """The schema registry does not answer, or says that it cannot for now."""


class SchemaNotFoundError(StreamAssetsError, Terminal):
    """The schema registry has no such schema, or no such subject."""


class BackendLoadError(StreamAssetsError, Terminal):
    """A package registers a backend for a URL scheme, and the backend cannot be used."""
