"""A local Spark Connect server of one user, started on demand, that outlives the runs that use it.

A run gets a session from :func:`spark_jobs.spark_server.client.connect`. Each configuration has one server
(:mod:`spark_jobs.spark_server.configuration`), which runs :mod:`spark_jobs.spark_server.process` and keeps its state in
a folder of its own (:mod:`spark_jobs.spark_server.folder`).
"""
