"""Refusals of one process, as the others see them."""

import jax
import pytest

from bert_jax.distributed import agreement
from bert_jax.errors import OutageError, UserError


def compute(refuse):
    return agreement.compute_and_broadcast("a value", refuse)


@pytest.mark.parametrize("kind", [UserError, OutageError])
@pytest.mark.parametrize("refusing", [compute, agreement.raise_on_all])
def test_all_processes_end_with_the_same_exit_code(monkeypatch, kind, refusing):
    """A store that is away makes all processes try again; a mistake ends all."""

    def refuse():
        raise kind("no")

    sent = []

    def exchange(name, value, read):
        sent.append(value)
        return sent[0] if read is agreement._read_first else sent

    monkeypatch.setattr(agreement, "is_first", lambda: not sent)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(agreement, "_exchange", exchange)
    with pytest.raises(UserError, match=r"^no$"):
        refusing(refuse)
    with pytest.raises(UserError, match="process 0 refused") as raised:
        refusing(lambda: None)
    assert raised.type is kind
