"""The documentation site: `python -m sphinx -W --keep-going docs SITE`, after `pip install "nvrtc-attn[docs]"`.

The reference is made of the docstrings of the checkout. What needs a framework is read from its source
(`from_source`), so that the site is the same on a machine without any.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import nvrtc_attn

project = "nvrtc_attn"
author = "The nvrtc_attn authors"
version = release = nvrtc_attn.__version__
html_title = f"nvrtc_attn {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "from_source"]
html_theme = "furo"
html_copy_source = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
# Not preserved: these functions have keyword arguments of the table of operands, which their text does not spell out.
autodoc_preserve_defaults = False
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = False
# Single backticks in docstrings name objects of the package.
default_role = "py:obj"
