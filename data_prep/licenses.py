"""Licenses of text: identifiers, and which of them the Hugging Face Hub knows."""

import re
from collections.abc import Iterable

from bert_jax.errors import UserError

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,99}")
_HUB_IDS = frozenset(
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0 lgpl
    lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib
    pddl lgpl-lr deepfloyd-if-license llama2 gemma unknown other
    """.split()  # noqa: SIM905
)
"""Of https://huggingface.co/docs/hub/repositories-licenses; a later one is written as `other` with its name."""


def check_setting(license_id: str) -> str:
    """The license of a source.

    Raises:
      UserError: it is no identifier.
    """
    if not _ID.fullmatch(license_id):
        raise UserError(
            f"--license {license_id!r}: write an identifier such as cc-by-sa-4.0 or LicenseRef-mine: letters, digits,"
            " '.', '+' and '-', at most 100"
        )
    return license_id


def hub_fields(license_ids: Iterable[str | None]) -> dict[str, str | list[str]]:
    """The fields `license` and `license_name` of a card at the Hugging Face Hub.

    Args:
      license_ids: of each source; None: not stated.
    """
    given = list(dict.fromkeys(one or "unknown" for one in license_ids))
    known = list(dict.fromkeys(one.lower() if one.lower() in _HUB_IDS else "other" for one in given))
    others = [one for one in given if one.lower() not in _HUB_IDS]
    names = {"license_name": others[0]} if len(others) == 1 else {}
    return {"license": known[0] if len(known) == 1 else known, **names} if known else {}
