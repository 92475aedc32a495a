"""Makes tests/golden/minicons.json: pseudo-log-likelihoods of minicons, which does not run beside transformers 5.

Commands, from the root of the clone; the first with the extra `parity` installed, the second in an environment with
minicons 0.3.39 and transformers 4.57:

    python -m tests.golden.make_minicons save DIR
    python tests/golden/make_minicons.py score DIR
"""

import json
import pathlib
import sys

PATH = pathlib.Path(__file__).parent / "minicons.json"
FAMILIES = ("bert", "roberta", "albert")
"""Of tests/live/small_models.py: WordPiece, byte-level BPE, SentencePiece."""
VARIANTS = ("original", "within_word_l2r")
SENTENCES = ("The river sings.", "a crab don't", "isn't it; so?", "quick-witted stone", "the slow wind runs")


def save(directory: pathlib.Path) -> None:
    """A model of each family."""
    from tests.live import small_models

    for family in FAMILIES:
        scratch = directory / f"{family}.scratch"
        for one in (directory / family, scratch):
            one.mkdir(parents=True)
        small_models.save(family, directory / family, scratch)


def score(directory: pathlib.Path) -> None:
    """Scores of the tokens of each sentence, by family and variant."""
    from minicons.scorer import MaskedLMScorer

    found: dict[str, dict[str, list[list[float]]]] = {}
    for family in FAMILIES:
        scorer = MaskedLMScorer(str(directory / family), "cpu")
        encoded = scorer.tokenizer(list(SENTENCES), padding="longest", return_tensors="pt")
        found[family] = {}
        for variant in VARIANTS:
            scores = scorer.compute_stats(scorer.prepare_text(encoded, PLL_metric=variant))
            found[family][variant] = [[round(float(x), 6) for x in of_sentence] for of_sentence in scores]
    PATH.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    {"save": save, "score": score}[sys.argv[1]](pathlib.Path(sys.argv[2]))
