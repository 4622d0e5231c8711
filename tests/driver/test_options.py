"""The private copies of files that options name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from aionn.driver.options import OptionalFacts
from aionn.hal.options import EngineOptions
from tests.runtime.option_engine import OptionEngine


def test_no_process_can_change_the_copy_that_an_engine_gets(tmp_path: Path) -> None:
    path = tmp_path / "library"
    path.write_bytes(b"the library")
    facts: Any = OptionalFacts(OptionEngine())
    options = EngineOptions({"file": str(path)}, {"file": blake3(b"the library").digest()})
    copy = Path(str(facts.given(options)["file"]))
    path.write_bytes(b"another one")
    assert copy.read_bytes() == b"the library"
    with pytest.raises(PermissionError), copy.open("r+b", buffering=0) as file:
        file.write(b"x")
    assert facts.given(options)["file"] == str(copy), "one copy serves every compilation with these bytes"
    assert copy.read_bytes() == b"the library"
