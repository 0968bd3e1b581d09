"""Progress bars as tests see them: what was counted, whether a terminal is there or not."""

import io
from types import ModuleType
from typing import Any

import pytest
from tqdm import tqdm


def watched_bars(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[Any]:
    """Every bar that the module makes from now on, with the number of its moves."""
    made: list[Any] = []

    class Watched(tqdm):  # type: ignore[type-arg]
        def __init__(self, **options: Any) -> None:
            assert options["disable"] is None, "a bar must be off where stderr is no terminal"
            super().__init__(**options | {"disable": False, "file": io.StringIO()})
            self.moves = 0
            made.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            self.moves += 1
            return super().update(n)

    monkeypatch.setattr(module, "tqdm", Watched)
    return made
