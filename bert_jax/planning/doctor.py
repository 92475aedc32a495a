"""`bert-jax doctor`: one check after the other, each said in lines."""

from collections.abc import Callable, Iterator, Sequence

from bert_jax.config import Config
from bert_jax.data.mixture import Turns
from bert_jax.data.parts import Part, opened, resolve
from bert_jax.errors import UserError
from bert_jax.planning import data_checks
from bert_jax.planning.data_checks import Asked
from bert_jax.planning.lines import Line

CHECKS: dict[str, Callable[[Asked], Iterator[Line]]] = data_checks.CHECKS


def examine(config: Config, parts: Sequence[Part]) -> Iterator[Line]:
    """What a config makes of a mixture, a line as soon as it is known.

    What `bert-jax pretrain` would refuse is a line of level "error"; the other checks go on, unless there is
    nothing that they could look at.
    """
    try:
        ordered, corpora = opened(parts)
        shares = resolve(ordered, [corpus.num_tokens for corpus in corpora], config.data.mixture_exponent)
        asked = Asked(config, corpora, Turns(shares))
    except UserError as error:
        yield Line("error", "corpora", str(error), {})
        return
    for name, check in CHECKS.items():
        try:
            yield from check(asked)
        except UserError as error:
            yield Line("error", name, str(error), {})
