"""Everything that users need comes from the package itself."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import stream_consumers


@pytest.mark.parametrize("name", stream_consumers.__all__)
def test_each_name_is_there(name: str) -> None:
    assert getattr(stream_consumers, name) is not None


def test_no_name_is_that_of_a_module() -> None:
    """Importing a module sets its name in the package, so that the module would take the place of the other thing."""
    modules = {module.name for module in pkgutil.iter_modules(stream_consumers.__path__)}
    assert modules.isdisjoint(stream_consumers.__all__)


def test_star_gives_the_names() -> None:
    found: dict[str, object] = {}
    exec("from stream_consumers import *", found)
    assert set(stream_consumers.__all__) <= found.keys()
    assert set(stream_consumers.__all__) <= set(dir(stream_consumers))


def test_a_name_that_is_not_there_is_told_as_python_tells_it() -> None:
    with pytest.raises(ImportError, match="cannot import name 'conect' from 'stream_consumers'"):
        exec("from stream_consumers import conect")


def test_what_is_not_asked_for_is_not_imported() -> None:
    heavy = "{'redis', 'confluent_kafka', 'pyarrow'}"
    script = f"import sys; from stream_consumers import Message; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
