"""Streams into Delta tables exactly once, as Dagster assets.

What users need is imported from here: ``from stream_assets import stream_asset, stream_definitions, Json``. The file
``__init__.pyi`` beside this one lists the names. A name's module is imported when somebody first asks for it: Dagster
takes a second to import, and the command line needs it only for some of its commands.
"""

from stream_consumers.front_door import front_door

__getattr__, __dir__ = front_door(__name__)
