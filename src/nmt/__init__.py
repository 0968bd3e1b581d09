"""nmt: from a raw parallel corpus to a trained, scored Transformer."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nmt.decoding.translator import Translator

__all__ = ["Translator"]


def __getattr__(name: str) -> Any:
    """`nmt.Translator`, imported when it is asked for: `import nmt` loads no torch."""
    if name == "Translator":
        from nmt.decoding.translator import Translator

        return Translator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
