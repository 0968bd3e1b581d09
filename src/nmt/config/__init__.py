"""The settings: which there are (`schema`), from files and words to values (`loading`), and what a wrong name meant.

Imports neither torch nor a stage, so anyone may import it.
"""

from nmt.config.loading import (
    change,
    differences,
    find_file,
    from_dict,
    load,
    load_with_origins,
    recipes,
    sentences,
    show,
)
from nmt.config.schema import (
    LONGEST_NAME,
    NUMERICS,
    RUNTIME,
    SECTIONS,
    BpeConfig,
    CleanConfig,
    Config,
    DataConfig,
    EncodeConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    Precision,
    RuntimeConfig,
    TrainConfig,
    TranslateConfig,
    check_name,
    kinds,
    of_kind,
    to_dict,
)

__all__ = [
    "LONGEST_NAME", "NUMERICS", "RUNTIME", "SECTIONS", "BpeConfig", "CleanConfig", "Config", "DataConfig",
    "EncodeConfig", "EvalConfig", "ModelConfig", "OptimConfig", "Precision", "RuntimeConfig", "TrainConfig",
    "TranslateConfig", "change", "check_name", "differences", "find_file", "from_dict", "kinds", "load",
    "load_with_origins", "of_kind", "recipes", "sentences", "show", "to_dict",
]  # fmt: skip
