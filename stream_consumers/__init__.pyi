"""The names that ``from stream_consumers import …`` gives, each with the module that it is from."""

from stream_consumers.async_consumer import AsyncConsumer as AsyncConsumer
from stream_consumers.backend import (
    Backend as Backend,
    ConsumerOptions as ConsumerOptions,
    find_backend as find_backend,
)
from stream_consumers.batches import (
    MESSAGE_SCHEMA as MESSAGE_SCHEMA,
    BatchPlan as BatchPlan,
    BatchSource as BatchSource,
    Extent as Extent,
    Membership as Membership,
    Range as Range,
    Resume as Resume,
    Split as Split,
    dead_letter_row as dead_letter_row,
    message_row as message_row,
    record_batches as record_batches,
)
from stream_consumers.capabilities import ShardEnd as ShardEnd
from stream_consumers.client_config import ClientConfig as ClientConfig, EnvironmentVariable as EnvironmentVariable
from stream_consumers.committer import (
    EntryCommitter as EntryCommitter,
    PositionCommitter as PositionCommitter,
    ProcessCommitter as ProcessCommitter,
    TransactionCommitter as TransactionCommitter,
)
from stream_consumers.consumer import (
    Consumer as Consumer,
    DeadLetterObserver as DeadLetterObserver,
    Edge as Edge,
    GroupConsumer as GroupConsumer,
    Producer as Producer,
    log_dead_letter as log_dead_letter,
)
from stream_consumers.consumer_base import (
    Assignment as Assignment,
    PollingConsumer as PollingConsumer,
    end_of as end_of,
    no_message as no_message,
)
from stream_consumers.create import (
    StreamSource as StreamSource,
    create_consumer as create_consumer,
    create_producer as create_producer,
    open_batch_source as open_batch_source,
)
from stream_consumers.errors import (
    AccessDeniedError as AccessDeniedError,
    BackendLoadError as BackendLoadError,
    BatchTooLargeError as BatchTooLargeError,
    BrokerError as BrokerError,
    BrokerUnavailableError as BrokerUnavailableError,
    CatalogUnavailableError as CatalogUnavailableError,
    DataLossError as DataLossError,
    DeliverySettledError as DeliverySettledError,
    ForeignCommitError as ForeignCommitError,
    FormatError as FormatError,
    GroupActiveError as GroupActiveError,
    GroupNotFoundError as GroupNotFoundError,
    GroupRemovedError as GroupRemovedError,
    GroupsNotRememberedError as GroupsNotRememberedError,
    InvalidOptionError as InvalidOptionError,
    InvalidStreamKeyError as InvalidStreamKeyError,
    InvalidUrlError as InvalidUrlError,
    LedgerTruncatedError as LedgerTruncatedError,
    LedgerUnreadableError as LedgerUnreadableError,
    MissingDependencyError as MissingDependencyError,
    NotSubscribedError as NotSubscribedError,
    OutOfBoundsError as OutOfBoundsError,
    ProducerBusyError as ProducerBusyError,
    ProducerEndedError as ProducerEndedError,
    ProducerFencedError as ProducerFencedError,
    SchemaMismatchError as SchemaMismatchError,
    ShutdownTimeoutError as ShutdownTimeoutError,
    SizeLimitError as SizeLimitError,
    SourceRecreatedError as SourceRecreatedError,
    SparkEndedError as SparkEndedError,
    SparkSessionError as SparkSessionError,
    StreamAssetsError as StreamAssetsError,
    StreamEndedError as StreamEndedError,
    StreamExistsError as StreamExistsError,
    StreamNotFoundError as StreamNotFoundError,
    StreamRemovedError as StreamRemovedError,
    TableUnreadableError as TableUnreadableError,
    Terminal as Terminal,
    TokenProviderError as TokenProviderError,
    TransactionAbortedError as TransactionAbortedError,
    TransformError as TransformError,
    Transient as Transient,
    TruncatedTailError as TruncatedTailError,
    UnsupportedError as UnsupportedError,
    UnsupportedVersionError as UnsupportedVersionError,
    WriteError as WriteError,
)
from stream_consumers.file.consumer import FileConsumer as FileConsumer
from stream_consumers.file.producer import FileProducer as FileProducer
from stream_consumers.in_process_groups import SharedGroupConsumer as SharedGroupConsumer
from stream_consumers.kafka.committer import KafkaCommitter as KafkaCommitter
from stream_consumers.kafka.consumer import KafkaConsumer as KafkaConsumer
from stream_consumers.kafka.producer import KafkaProducer as KafkaProducer
from stream_consumers.kafka.transactions import KafkaTransactions as KafkaTransactions
from stream_consumers.memory import (
    MemoryBatchSource as MemoryBatchSource,
    MemoryCommitter as MemoryCommitter,
    MemoryConsumer as MemoryConsumer,
    MemoryProducer as MemoryProducer,
    forget_memory_broker as forget_memory_broker,
)
from stream_consumers.messages import (
    WILDCARD as WILDCARD,
    DeadLetter as DeadLetter,
    Message as Message,
    Receipt as Receipt,
    Shard as Shard,
    from_milliseconds as from_milliseconds,
    to_milliseconds as to_milliseconds,
)
from stream_consumers.options import (
    AutoCommit as AutoCommit,
    AutoStreamReset as AutoStreamReset,
    ConsumerMode as ConsumerMode,
    DataLoss as DataLoss,
    FileCreation as FileCreation,
    FileProducerOptions as FileProducerOptions,
    Limits as Limits,
    Modes as Modes,
    RedisGroupOptions as RedisGroupOptions,
    host_id as host_id,
)
from stream_consumers.producer_base import ProducerBase as ProducerBase
from stream_consumers.redis.async_entry_consumer import AsyncEntryConsumer as AsyncEntryConsumer
from stream_consumers.redis.committers import (
    RedisCommitter as RedisCommitter,
    RedisGroupCommitter as RedisGroupCommitter,
)
from stream_consumers.redis.consumer import RedisConsumer as RedisConsumer
from stream_consumers.redis.entry_consumer import (
    Entry as Entry,
    EntryConsumer as EntryConsumer,
    GroupEntryConsumer as GroupEntryConsumer,
    create_entry_consumer as create_entry_consumer,
)
from stream_consumers.redis.group_consumer import RedisGroupConsumer as RedisGroupConsumer
from stream_consumers.redis.producer import RedisProducer as RedisProducer
from stream_consumers.stdio.consumer import StdioConsumer as StdioConsumer
from stream_consumers.stdio.producer import StdioProducer as StdioProducer, StdioProducerOptions as StdioProducerOptions
from stream_consumers.stdio.spool import spool_stdin as spool_stdin
from stream_consumers.streamer.producer import StreamerProducer as StreamerProducer
from stream_consumers.streamer.sharders import (
    PseudoRandom as PseudoRandom,
    RoundRobin as RoundRobin,
    Sharder as Sharder,
)
from stream_consumers.streamer.streamer import (
    Streamer as Streamer,
    connect as connect,
    rewind_after as rewind_after,
    seek_after as seek_after,
)
from stream_consumers.subscription.backend import StreamBackend as StreamBackend
from stream_consumers.subscription.config import (
    AckMode as AckMode,
    RetryPolicy as RetryPolicy,
    SubscriptionConfig as SubscriptionConfig,
)
from stream_consumers.subscription.memory_backend import MemoryBackend as MemoryBackend
from stream_consumers.subscription.messages import (
    DecodedEntry as DecodedEntry,
    Delivery as Delivery,
    EventMessage as EventMessage,
    FetchedEntry as FetchedEntry,
    GroupPosition as GroupPosition,
    MalformedEntry as MalformedEntry,
)
from stream_consumers.subscription.received_message import ReceivedMessage as ReceivedMessage
from stream_consumers.subscription.redis_backend import RedisBackend as RedisBackend
from stream_consumers.subscription.subscription import Subscription as Subscription
from stream_consumers.tracking.committers import (
    CommitResult as CommitResult,
    create_committer as create_committer,
)
from stream_consumers.tracking.consumer import TrackedConsumer as TrackedConsumer
from stream_consumers.tracking.livelock import (
    Livelock as Livelock,
    LivelockOptions as LivelockOptions,
    LivelockWatch as LivelockWatch,
    ShardProgress as ShardProgress,
)
from stream_consumers.tracking.options import (
    Activity as Activity,
    Scheduler as Scheduler,
    TrackingCallbacks as TrackingCallbacks,
    TrackingOptions as TrackingOptions,
)
from stream_consumers.urls import StreamUrl as StreamUrl
