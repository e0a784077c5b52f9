"""A local Spark that outlives the runs that use it: a Spark Connect server of the user's own, started on demand.

A run asks :func:`spark_jobs.spark_server.client.connect` for a session. There is one server for each configuration
(:mod:`spark_jobs.spark_server.configuration`), with a folder of its own (:mod:`spark_jobs.spark_server.folder`), and it
is a process of :mod:`spark_jobs.spark_server.process`.
"""
