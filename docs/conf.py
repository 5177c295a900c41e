"""Settings of Sphinx, with which `make docs` builds the site in out/docs."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import docstrings

import fmoe_ext

project = "fmoe_ext"
author = "the authors of fmoe_ext"
copyright = "the authors of fmoe_ext, Apache 2.0"
version = release = fmoe_ext.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "headers",
]
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
myst_heading_anchors = 3
exclude_patterns = ["history"]  # a diary, for readers of the repository
suppress_warnings = ["misc.highlighting_failure"]  # examples with ... in JSON
smartquotes = False  # "gelu" is a string

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False  # torch.nn.Module's are not about our classes
python_maximum_signature_line_length = 88

html_theme = "furo"
pygments_dark_style = (
    "github-dark"  # the default one underlines names, as if they were links
)
html_title = f"fmoe_ext {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_favicon = "static/favicon.svg"
html_search_scorer = str(Path(__file__).parent / "static" / "search_scorer.js")
html_show_sourcelink = False
html_copy_source = False


def add_index(app, docname, source):
    """Make index entries, which the search ranks first, of comments `<!-- index: words, that readers type -->`."""

    def directive(match):
        return (
            "```{index} "
            + ", ".join(f"! {word.strip()}" for word in match[1].split(","))
            + "\n```"
        )

    source[0] = re.sub(r"<!-- index: (.*?) -->", directive, source[0])


def setup(app):
    app.connect("source-read", add_index)
    app.connect("autodoc-process-docstring", docstrings.convert)
    app.connect("autodoc-skip-member", docstrings.skip)
    app.connect("autodoc-process-signature", docstrings.plain_defaults)
