"""Everything that users need comes from the package itself."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import stream_assets
import stream_consumers


@pytest.mark.parametrize("package", [stream_assets, stream_consumers], ids=lambda package: package.__name__)
def test_the_stub_has_the_names_and_each_is_there(package: ModuleType) -> None:
    stub = ast.parse((pkgutil.get_data(package.__name__, "__init__.pyi") or b"").decode())
    imports = [statement for statement in stub.body if isinstance(statement, ast.ImportFrom)]
    assert sorted(alias.name for statement in imports for alias in statement.names) == package.__all__
    assert all(getattr(package, name) is not None for name in package.__all__)


def test_no_name_is_that_of_a_module() -> None:
    """Importing a module sets its name in the package, so that the module would take the place of the other thing."""
    modules = {module.name for module in pkgutil.iter_modules(stream_consumers.__path__)}
    assert modules.isdisjoint(stream_consumers.__all__)


def test_what_is_not_asked_for_is_not_imported() -> None:
    heavy = "{'redis', 'confluent_kafka', 'pyarrow'}"
    script = f"import sys; from stream_consumers import Message; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
