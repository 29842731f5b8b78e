"""Sphinx's settings; `build_site.py` gives it the pages. Nothing is loaded from elsewhere, now or
by a reader.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pygments.lexers.data import JsonLexer  # noqa: E402
from sphinx.highlighting import lexers  # noqa: E402

from finetune.runtime.launch_environment import import_bitsandbytes  # noqa: E402
from finetune.version import __version__  # noqa: E402

import_bitsandbytes()  # peft, and with it every trainer, would have it complain
lexers["jsonl"] = JsonLexer()

project = "finetune"
author = copyright = "the finetune authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
source_suffix = {".md": "markdown"}
# As GitHub has them, so that one link serves both.
myst_heading_anchors = 4
highlight_language = "text"
default_role = "code"  # in docstrings
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
locale_dirs = [str(ROOT / "build" / "site" / "locale")]
gettext_compact = False
gettext_location = False
gettext_uuid = False
html_theme = "furo"
html_title = f"finetune {__version__}"
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "language.html", "sidebar/search.html"),
        *("sidebar/scroll-start.html", "sidebar/navigation.html", "sidebar/scroll-end.html"),
    ]
}
