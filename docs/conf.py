"""Settings of Sphinx for the documentation site, which ``bash scripts/docs.sh`` builds without a network."""

import ast
import dataclasses
import inspect
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import bert_jax  # noqa: E402
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
        return self.parse_text_to_nodes("\n".join(_sections(bert_jax.Config, "")), allow_section_headings=True)


def _sections(kind: type, prefix: str) -> Iterator[str]:
    """Markdown: the fields of a dataclass, then those of the dataclasses in it."""
    docs, nested = _field_docs(kind), []
    hints = typing.get_type_hints(kind, include_extras=True)
    yield f"## {prefix.rstrip('.') or 'Run'}\n\n{inspect.getdoc(kind)}\n"
    for field in dataclasses.fields(kind):
        arguments = typing.get_args(hints[field.name])
        section = next((hint for hint in (hints[field.name], *arguments) if dataclasses.is_dataclass(hint)), None)
        if section is not None:
            nested.append((section, f"{prefix}{field.name}{'.N' if arguments else ''}."))
            continue
        default = "" if field.default is dataclasses.MISSING else f", default `{field.default!r}`"
        yield f"`{prefix}{field.name}` ({describe(hints[field.name])}{default})\n: {docs.get(field.name, '')}\n"
    for section, inner in nested:
        yield from _sections(section, inner)


def _field_docs(kind: type) -> dict[str, str]:
    """The docstrings of a dataclass' fields, each on one line."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    docs, name = {}, ""
    for node in definition.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs[name] = " ".join(inspect.cleandoc(str(node.value.value)).split())
    return docs


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    app.add_directive("config-fields", ConfigFields)
    return {"parallel_read_safe": True}
