"""Type stub: the names that ``stream_consumers`` exports, each imported from its module."""

from stream_consumers.async_consumer import AsyncConsumer as AsyncConsumer
from stream_consumers.backend import Backend as Backend
from stream_consumers.batches import BatchSource as BatchSource
from stream_consumers.client_config import EnvironmentVariable as EnvironmentVariable
from stream_consumers.consumer import Consumer as Consumer, Edge as Edge
from stream_consumers.create import (
    create_consumer as create_consumer,
    create_producer as create_producer,
    open_batch_source as open_batch_source,
)
from stream_consumers.errors import (
    InvalidOptionError as InvalidOptionError,
    StreamAssetsError as StreamAssetsError,
    StreamEndedError as StreamEndedError,
    Terminal as Terminal,
    Transient as Transient,
)
from stream_consumers.messages import DeadLetter as DeadLetter, Message as Message, Receipt as Receipt, Shard as Shard
from stream_consumers.options import (
    AutoCommit as AutoCommit,
    AutoStreamReset as AutoStreamReset,
    ConsumerMode as ConsumerMode,
    FileCreation as FileCreation,
    FileProducerOptions as FileProducerOptions,
    RedisGroupOptions as RedisGroupOptions,
)
from stream_consumers.producer import Producer as Producer
from stream_consumers.redis.entry_consumer import (
    AsyncEntryConsumer as AsyncEntryConsumer,
    EntryConsumer as EntryConsumer,
    GroupEntryConsumer as GroupEntryConsumer,
    create_entry_consumer as create_entry_consumer,
)
from stream_consumers.streamer import Streamer as Streamer, connect as connect
from stream_consumers.subscription.backend import EventMessage as EventMessage, StreamBackend as StreamBackend
from stream_consumers.subscription.config import (
    AckMode as AckMode,
    RetryPolicy as RetryPolicy,
    SubscriptionConfig as SubscriptionConfig,
)
from stream_consumers.subscription.memory_backend import MemoryBackend as MemoryBackend
from stream_consumers.subscription.redis_backend import RedisBackend as RedisBackend
from stream_consumers.subscription.subscription import ReceivedMessage as ReceivedMessage, Subscription as Subscription
from stream_consumers.tracking.commits import create_committer as create_committer
from stream_consumers.tracking.consumer import TrackedConsumer as TrackedConsumer
from stream_consumers.tracking.options import TrackingCallbacks as TrackingCallbacks, TrackingOptions as TrackingOptions
from stream_consumers.urls import StreamUrl as StreamUrl
