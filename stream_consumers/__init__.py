"""A stream-consumer library with one API for files, brokers and memory; it needs neither Dagster nor Spark.

Import common names from this package: ``from stream_consumers import connect, create_consumer, ConsumerMode``.
Import all other names from their modules: ``from stream_consumers.errors import DataLossError``.
"""

from stream_consumers.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "stream_consumers.async_consumer": ("AsyncConsumer",),
        "stream_consumers.backend": ("Backend",),
        "stream_consumers.batches": ("BatchSource",),
        "stream_consumers.client_config": ("EnvironmentVariable",),
        "stream_consumers.consumer": ("Consumer", "Edge"),
        "stream_consumers.create": ("create_consumer", "create_producer", "open_batch_source"),
        "stream_consumers.errors": (
            "InvalidOptionError",
            "StreamAssetsError",
            "StreamEndedError",
            "Terminal",
            "Transient",
        ),
        "stream_consumers.messages": ("DeadLetter", "Message", "Receipt", "Shard"),
        "stream_consumers.options": (
            "AutoCommit",
            "AutoStreamReset",
            "ConsumerMode",
            "FileCreation",
            "FileProducerOptions",
            "RedisGroupOptions",
        ),
        "stream_consumers.producer": ("Producer",),
        "stream_consumers.redis.entry_consumer": (
            "AsyncEntryConsumer",
            "EntryConsumer",
            "GroupEntryConsumer",
            "create_entry_consumer",
        ),
        "stream_consumers.streamer": ("Streamer", "connect"),
        "stream_consumers.subscription.backend": ("EventMessage", "StreamBackend"),
        "stream_consumers.subscription.config": ("AckMode", "RetryPolicy", "SubscriptionConfig"),
        "stream_consumers.subscription.memory_backend": ("MemoryBackend",),
        "stream_consumers.subscription.redis_backend": ("RedisBackend",),
        "stream_consumers.subscription.subscription": ("ReceivedMessage", "Subscription"),
        "stream_consumers.tracking.commits": ("create_committer",),
        "stream_consumers.tracking.consumer": ("TrackedConsumer",),
        "stream_consumers.tracking.options": ("TrackingCallbacks", "TrackingOptions"),
        "stream_consumers.urls": ("StreamUrl",),
    },
)
