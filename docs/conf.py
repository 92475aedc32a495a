"""Settings of Sphinx for the documentation site, which ``bash scripts/docs.sh`` builds without a network."""

import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import tyro
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import bert_jax  # noqa: E402
from bert_jax.command import flags  # noqa: E402
from bert_jax.field_validation import describe  # noqa: E402

project, author, copyright = "bert_jax", "The bert_jax authors", "The bert_jax authors"
version = release = bert_jax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
default_role = "code"  # docstrings put code between single backticks
autodoc_member_order = "bysource"
html_theme, html_title = "furo", "bert_jax"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_copy_source = False


class CommandHelp(SphinxDirective):
    """``command-help:: MODULE WORD...`` shows what ``python -m MODULE WORD...`` prints."""

    required_arguments, optional_arguments = 1, 9

    def run(self) -> list[nodes.Node]:
        """The output as a literal block."""
        command = [sys.executable, "-m", *self.arguments]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [nodes.literal_block(text, text, language="text")]


class ConfigFields(SphinxDirective):
    """``config-fields::`` lists every field of a config: its flag, type, default and docstring."""

    def run(self) -> list[nodes.Node]:
        """A section with a definition list for each section of the config."""
        lines, fields = [], flags.list_flags(bert_jax.Config)
        for (section, owner), group in itertools.groupby(fields, key=lambda flag: (flag.section, flag.owner)):
            lines += [f"## {section.replace('phases.0', 'phases.N') or 'Run'}", "", inspect.getdoc(owner), ""]
            for flag in group:
                name = flag.names[0].removeprefix("--").replace("phases.0", "phases.N").replace("-", "_")
                default = "" if flag.default is tyro.MISSING else f", default `{flag.default!r}`"
                lines += [f"`{name}` ({describe(flag.kind)}{default})", f": {flag.help}", ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    app.add_directive("config-fields", ConfigFields)
    return {"parallel_read_safe": True}
