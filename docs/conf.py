"""How Sphinx builds these pages: ``sphinx-build -W --keep-going -n -b html docs docs/_build/html``."""

from __future__ import annotations

import kimicore

project = "KimiCore"
author = "The KimiCore authors"
copyright = "The KimiCore authors"
version = release = kimicore.__version__

extensions = ["sphinx.ext.autodoc", "myst_parser"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

html_theme = "alabaster"
html_theme_options = {"description": "An LLM inference engine inside your process", "fixed_sidebar": True}

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True

nitpick_ignore_regex = [
    # The standard library and other packages: their pages are not looked up, so that a build needs no network.
    ("py:.*", r"(collections|os|pathlib|types|typing|torch|jinja2)(\..*)?"),
    ("py:.*", r"(Any|Callable|Iterator|Literal|Mapping|PathLike|Self|Sequence|TracebackType)"),
    ("py:exc", r"(StopAsyncIteration|StopIteration|TypeError|ValueError|TimeoutError)"),
    # Internal types that stand in constructors which an application does not call itself.
    ("py:.*", r"(kimicore\.(face|handle)\.)?(Face|Handle|Job)"),
    # What a docstring of quantizing or verifying names of the inside, for who has such a thing in hand already.
    ("py:.*", r"kimicore\.model\.(load\.open_source|source\.WeightSource|transformer\.Transformer)|METHODS"),
    ("py:.*", r"kimicore\.policies\.precision\.resolving\.ResolvedMap"),
    ("py:.*", r"kimicore\.quantize\.(reuse\.EarlierLayers|run\.quantize_model)"),
]
