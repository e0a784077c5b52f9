"""Stream files: SeaStreamer's ``.ss`` format, byte for byte."""
