"""Pipes: lines on standard input and output."""
