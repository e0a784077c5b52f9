"""Benchmarks against alternative tools and against the least that the work can cost: ``make bench``.

:mod:`benchmarks.__main__` is the command. A suite is a function that takes a :class:`benchmarks.harness.Bench`, and a
case is a name and a function. After each case the rows are compared with the stream, so that no case is fast by losing
messages. :mod:`benchmarks.shards` measures the consumer library: a thousand shards against ten.
"""
