"""The command line, ``stream-assets``."""
