"""A stream-consumer library: one set of words over files, brokers and memory; no Dagster, no Spark.

What users need is imported from here: ``from stream_consumers import connect, create_consumer, ConsumerMode``. The file
``__init__.pyi`` beside this one lists the names.
"""

from stream_consumers.front_door import front_door

__getattr__, __dir__ = front_door(__name__)
