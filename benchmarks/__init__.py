"""How fast it is, beside what people would use instead and beside the least that the work can cost: ``make bench``.

:mod:`benchmarks.__main__` is the command. A suite is a function that takes a :class:`benchmarks.harness.Bench`, and a
case is a name and a function; rows are compared with the stream after each case, so that nobody is fast by losing some.
:mod:`benchmarks.shards` is another question, about the consumer library: a thousand shards beside ten.
"""
