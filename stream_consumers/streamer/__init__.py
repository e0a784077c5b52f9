"""SeaStreamer's ``Streamer``: one connection that makes consumers and producers."""
