"""nmt: from a raw parallel corpus to a trained, scored Transformer."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nmt.config import load as load_config
    from nmt.decoding.translator import Translator
    from nmt.pipeline.stages import run_pipeline

__all__ = ["Translator", "load_config", "run_pipeline"]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: `import nmt` loads no torch."""
    if name == "Translator":
        from nmt.decoding.translator import Translator

        return Translator
    if name == "load_config":
        from nmt.config import load

        return load
    if name == "run_pipeline":
        from nmt.pipeline.stages import run_pipeline

        return run_pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
