"""Delta's log stores in Java processes of their own, without Spark."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyspark
import pytest
from py4j import java_gateway, protocol
from py4j.java_gateway import CallbackServerParameters, GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JJavaError

from spark_jobs.jars import delta_jars, java, s3_jars


class Lines:
    """The lines of a commit, as Java iterates over them; ``meanwhile`` is called when the first one is asked for."""

    def __init__(self, lines: Sequence[str], meanwhile: Callable[[], object]) -> None:
        self._left = list(lines)
        self._meanwhile = meanwhile

    def hasNext(self) -> bool:  # noqa: N802 - Java's name
        meanwhile, self._meanwhile = self._meanwhile, lambda: None
        meanwhile()
        return bool(self._left)

    def next(self) -> str:
        return self._left.pop(0)

    class Java:
        implements = ["java.util.Iterator"]  # noqa: RUF012 - py4j wants a list


class LogStore:
    """A log store in a JVM of its own."""

    def __init__(self, gateway: JavaGateway, class_name: str, settings: Mapping[str, str]) -> None:
        self._jvm: Any = gateway.jvm
        self._configuration = self._jvm.org.apache.hadoop.conf.Configuration()
        for name, value in settings.items():
            self._configuration.set(name, value)
        made = self._jvm
        for part in class_name.split("."):
            made = getattr(made, part)
        self._store = made(self._configuration)

    @contextmanager
    def having(self, settings: Mapping[str, str]) -> Iterator[None]:
        """With more settings of Hadoop."""
        for name, value in settings.items():
            self._configuration.set(name, value)
        yield
        for name in settings:
            self._configuration.unset(name)

    def put(
        self, file: Path | str, *lines: str, meanwhile: Callable[[], object] | None = None, overwrite: bool = False
    ) -> bool:
        """Put a commit, at a path or a URI; ``False`` if the log store says that it is there."""
        path = self._jvm.org.apache.hadoop.fs.Path(f"file://{file}" if isinstance(file, Path) else file)
        # As Delta calls it: a plain iterator, which chooses among methods of the same name.
        actions = Lines(lines, meanwhile) if meanwhile else self._jvm.java.util.ArrayList(list(lines)).iterator()
        try:
            self._store.write(path, actions, overwrite, self._configuration)
        except Py4JJavaError as error:
            if "FileAlreadyExistsException" not in str(error.java_exception):
                raise
            return False
        return True


@contextmanager
def log_store(class_name: str, settings: Mapping[str, str] | None = None) -> Iterator[LogStore]:
    """A log store in a new JVM; with settings of Hadoop it has the jars for Amazon S3."""
    jars = [*(Path(pyspark.__file__).parent / "jars").glob("*.jar"), *delta_jars(), *(s3_jars() if settings else ())]
    classpath = os.pathsep.join(map(str, jars))
    port = launch_gateway(classpath=classpath, die_on_exit=True, java_path=java())
    gateway = JavaGateway(
        gateway_parameters=GatewayParameters(port=port, auto_convert=True),
        callback_server_parameters=CallbackServerParameters(port=0),
    )
    # Where there is a Spark session, pyspark has this function ask its own JVM about each error, also about ours.
    of_others, ours = java_gateway.get_return_value, gateway._gateway_client

    def get_return_value(answer: Any, client: Any, *more: Any) -> Any:
        return (protocol.get_return_value if client is ours else of_others)(answer, client, *more)

    patch = pytest.MonkeyPatch()
    patch.setattr(java_gateway, "get_return_value", get_return_value)
    try:
        server = gateway.java_gateway_server
        server.resetCallbackClient(
            server.getCallbackClient().getAddress(), gateway.get_callback_server().get_listening_port()
        )
        yield LogStore(gateway, class_name, settings or {})
    finally:
        gateway.shutdown()
        patch.undo()
