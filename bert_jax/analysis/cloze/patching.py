"""Activation patching over minimal pairs: which activation carries the difference between two sentences?

Both sentences of a pair have as many tokens and differ in some. One token that they share is masked in both, the one
whose prediction depends most on the difference; the total effect is its log-probability in the better sentence minus
that in the worse one. Then the model reads the worse sentence, and one of its activations is replaced by that of the
better one: the change of the log-probability, as a share of the total effect, is what this activation restores
(denoising, Vig et al. 2020, arXiv:2004.12265; Meng et al. 2022, arXiv:2202.05262). The control replaces it by that of
the better sentence of another pair with as many tokens. Where an activation carries a feature alone, such as number,
this control restores in the mean the share of other pairs whose better sentence has the same value, 1/2 for number;
where it carries nothing, 0.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.analysis.bootstrap import BootstrapMean, bootstrap_mean, cross_fit
from bert_jax.analysis.cloze.minimal_pairs import SentencePair, draw_pairs, read_pairs
from bert_jax.analysis.cloze.patching_section import BEST_HEAD, CONTEXT, blocks, scalars
from bert_jax.analysis.cloze.verb_agreement import scores_of_tokens
from bert_jax.analysis.item_scores import MODEL, ItemScores
from bert_jax.analysis.suite import ITEMS, Suite, SuiteInputs, SuiteResult, UnsuitedError
from bert_jax.array_types import Bool, Float
from bert_jax.command.progress import progress_bar
from bert_jax.field_validation import Count, check
from bert_jax.inference.embedding import pad_rows, row_length
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.interventions.capture import capture
from bert_jax.interventions.rows import TextBatch, TextRow, encode_sentences
from bert_jax.model.activations import Edit

FOLDER = "minimal_pairs"
BY_POSITION = ("hidden", "attention.output", "feed_forward.output")
"""Sites that are patched at the tokens of one role; `CONTEXT` is patched head by head, at all tokens."""
ROLES = ("[CLS]", "tokens that differ", "masked token", "other tokens", "[SEP]")
REASONS = ("no_tokens_or_too_long", "other_lengths", "same_tokens", "no_common_token", "no_effect")
"""Why a pair is left out; also "no_other_of_its_length", where it has no control."""
TOKENS_PER_BATCH = 1024


@dataclass(frozen=True)
class PatchingSettings:
    """Which pairs are patched."""

    pairs: Count = 60
    """Minimal pairs, the same number of each UID, drawn at random."""
    max_length: Count = 32
    """Tokens of a sentence, special ones included; longer ones are skipped."""

    def __post_init__(self) -> None:
        check(self, "patching.")


class MaskedPair(NamedTuple):
    """Two sentences with the same token masked."""

    clean: np.ndarray
    """Input ids of the better sentence, int32 [n], with the mask."""
    corrupted: np.ndarray
    """Those of the worse one, int32 [n]."""
    position: int
    """Of the mask."""
    target: int
    """The masked token."""
    differs: np.ndarray
    """bool [n]."""
    effect: float
    """Total effect in nats, above 0."""
    item: str
    """As in `SentencePair`."""

    @property
    def better(self) -> np.ndarray:
        """Input ids of the better sentence without the mask, int32 [n]."""
        ids = self.clean.copy()
        ids[self.position] = self.target
        return ids


class EncodedPair(NamedTuple):
    """The sentences of a pair."""

    good: TextRow
    bad: TextRow
    item: str
    """As in `SentencePair`."""


def encode_equal_lengths(
    pairs: Sequence[SentencePair], model: LoadedModel, max_length: int
) -> tuple[list[EncodedPair], Counter]:
    """Pairs that can be patched, and how many were skipped by reason.

    Args:
      pairs: from `minimal_pairs.read_pairs`.
      model: with a tokenizer.
      max_length: tokens of a sentence, special ones included.
    """
    sentences = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    encoded = encode_sentences(sentences, model.tokenizer, min(max_length, model.config.max_positions))
    kept, skipped = [], Counter(dict.fromkeys(REASONS, 0))
    for pair, good, bad in zip(pairs, encoded[::2], encoded[1::2], strict=True):
        if good is None or bad is None:
            skipped["no_tokens_or_too_long"] += 1
        elif len(good.input_ids) != len(bad.input_ids):
            skipped["other_lengths"] += 1
        elif (good.input_ids == bad.input_ids).all():
            skipped["same_tokens"] += 1
        elif not len(_common(good, bad, model)):
            skipped["no_common_token"] += 1
        else:
            kept.append(EncodedPair(good, bad, pair.item))
    return kept, skipped


def _common(good: TextRow, bad: TextRow, model: LoadedModel) -> np.ndarray:
    """Positions of the ordinary tokens that both sentences share."""
    ordinary = ~np.isin(good.input_ids, list(model.tokenizer.special_ids))
    return np.flatnonzero((good.input_ids == bad.input_ids) & ordinary)


def mask_pairs(pairs: Sequence[EncodedPair], model: LoadedModel, progress: bool) -> list[MaskedPair | None]:
    """Each pair with the common token masked whose log-probability differs most; None where none is higher.

    Args:
      pairs: from `encode_equal_lengths`.
      model: with an MLM head.
      progress: show a progress bar on stderr.
    """
    rows, tokens, places = [], [], []
    for number, (good, bad, _) in enumerate(pairs):
        for position in _common(good, bad, model):
            for row in (good, bad):
                ids = row.input_ids.copy()
                ids[position] = model.tokenizer.mask_id
                rows.append(row._replace(input_ids=ids))
            tokens.append(good.input_ids[position])
            places.append((number, position))
    scores = scores_of_tokens(model, rows, np.repeat(np.array(tokens, np.int64), 2)[:, None], progress)
    effects = scores[::2, 0].astype(float) - scores[1::2, 0]
    best: list[MaskedPair | None] = [None] * len(pairs)
    for i, (number, position) in enumerate(places):
        if effects[i] > (best[number].effect if best[number] else 0):
            clean, corrupted = rows[2 * i].input_ids, rows[2 * i + 1].input_ids
            differs = clean != corrupted
            about = int(position), int(tokens[i]), differs, float(effects[i]), pairs[number].item
            best[number] = MaskedPair(clean, corrupted, *about)
    return best


def choose_donors(pairs: Sequence[MaskedPair], seed: int) -> list[int]:
    """For each pair the index of another one with as many tokens and another better sentence; -1 where there is none.

    Every pair is the donor of at most one other.
    """
    donors, rng = np.full(len(pairs), -1), np.random.default_rng(seed)
    lengths = np.array([len(pair.clean) for pair in pairs])
    for length in np.unique(lengths):
        members = rng.permutation(np.flatnonzero(lengths == length))
        _, sentence = np.unique([pairs[i].better for i in members], axis=0, return_inverse=True)
        # Equal sentences are side by side, so a shift by the largest number of equal ones leads to another one, if any.
        order = np.argsort(rng.permutation(len(members))[sentence], kind="stable")
        shift = np.bincount(sentence).max()
        others = np.roll(order, shift)
        differs = sentence[order] != sentence[others]
        donors[members[order[differs]]] = members[others[differs]]
    return donors.tolist()


def roles(pair: MaskedPair, length: int) -> Bool[np.ndarray, "R S"]:
    """Which positions have each of ROLES."""
    n = len(pair.clean)
    found = np.zeros((len(ROLES), length), bool)
    found[0, 0], found[4, n - 1], found[2, pair.position] = True, True, True
    found[1, :n] = pair.differs
    found[3, 1 : n - 1] = ~(found[1] | found[2])[1 : n - 1]
    return found


class Effects(NamedTuple):
    """Changes of the log-probability of each pair in nats, by the activation that was replaced."""

    by_position: Mapping[str, Float[np.ndarray, "n L R"]]
    """By site, layer and role."""
    by_head: Float[np.ndarray, "n L N"]


def _batch(ids: Sequence[np.ndarray], length: int, pad_id: int) -> TextBatch:
    input_ids, mask = pad_rows(ids, length, pad_id)
    return TextBatch(input_ids, np.zeros_like(input_ids), mask, np.arange(len(ids)))


def patch(model: LoadedModel, pairs: Sequence[MaskedPair], sources: Sequence[np.ndarray], bar: Any) -> Effects:
    """The model reads the worse sentences, with one activation after the other from other rows.

    Args:
      model: with an MLM head.
      pairs: that are patched, as many as fit a forward pass.
      sources: for each pair the input ids whose activations are put in, as many tokens.
      bar: a progress bar of patches.
    """
    config, length = model.config, row_length(max(len(pair.clean) for pair in pairs), 8)
    pad_id, rows = model.tokenizer.pad_id, np.arange(len(pairs))
    corrupted = _batch([pair.corrupted for pair in pairs], length, pad_id)
    names = {site: f"layers.*.{site}" for site in (*BY_POSITION, CONTEXT)}
    values = capture(model, _batch(sources, length, pad_id), list(names.values()))
    positions, targets = (np.array([getattr(pair, key) for pair in pairs]) for key in ("position", "target"))

    def score(site: str | None = None, chosen: np.ndarray | None = None) -> np.ndarray:
        """Log-probabilities of the targets [B]; `chosen` [L, B, S, ...] is broadcast to the activation."""
        edits = {}
        if site is not None:
            put = np.broadcast_to(chosen, values[names[site]].shape)
            edits[site] = Edit((~put).astype(np.float32), np.where(put, values[names[site]], np.float32(0)))
            bar.update()
        logits = capture(model, corrupted, ["mlm_logits"], edits=edits, positions=positions[:, None].astype(np.int32))
        logits = logits["mlm_logits"][:, 0].astype(np.float64)
        top = logits.max(1)
        return logits[rows, targets] - top - np.log(np.exp(logits - top[:, None]).sum(1))

    before = score()
    of_roles = np.stack([roles(pair, length) for pair in pairs])
    layers = np.arange(config.num_layers)
    by_position = {site: np.zeros((len(pairs), config.num_layers, len(ROLES))) for site in BY_POSITION}
    for site, found in by_position.items():
        for layer in layers:
            for role in range(len(ROLES)):
                chosen = (layers == layer)[:, None, None, None] & of_roles[None, :, role, :, None]
                found[:, layer, role] = score(site, chosen) - before
    by_head = np.zeros((len(pairs), config.num_layers, config.num_heads))
    for layer in layers:
        for head in range(config.num_heads):
            of_head = (np.arange(config.num_heads) == head)[:, None]
            by_head[:, layer, head] = score(CONTEXT, (layers == layer)[:, None, None, None, None] & of_head) - before
    return Effects(by_position, by_head)


def measure(
    model: LoadedModel, pairs: Sequence[MaskedPair], sources: Sequence[np.ndarray], progress: bool, what: str
) -> Effects:
    """`patch` for any number of pairs."""
    patches = model.config.num_layers * (len(BY_POSITION) * len(ROLES) + model.config.num_heads)
    chunks = list(_chunks(pairs))
    parts = []
    with progress_bar(what, patches * len(chunks), "patch", shown=progress) as bar:
        for chunk in chunks:
            filled = np.resize(chunk, len(chunks[0]))
            found = patch(model, [pairs[i] for i in filled], [sources[i] for i in filled], bar)
            parts.append((chunk, found))
    order = np.argsort(np.concatenate([chunk for chunk, _ in parts]))

    def join(values: list[np.ndarray]) -> np.ndarray:
        kept = [one[: len(chunk)] for one, (chunk, _) in zip(values, parts, strict=True)]
        return np.concatenate(kept)[order]

    by_position = {site: join([found.by_position[site] for _, found in parts]) for site in BY_POSITION}
    return Effects(by_position, join([found.by_head for _, found in parts]))


def _chunks(pairs: Sequence[MaskedPair]) -> Iterator[np.ndarray]:
    """Indices of the pairs of each forward pass."""
    size = max(1, TOKENS_PER_BATCH // row_length(max(len(pair.clean) for pair in pairs), 8))
    for start in range(0, len(pairs), size):
        yield np.arange(start, min(start + size, len(pairs)))


def shares(effects: Float[np.ndarray, "n L K"], totals: Float[np.ndarray, " n"]) -> BootstrapMean:
    """Sum of effects over sum of total effects, with 95 % intervals of the bootstrap over pairs, [L, K] each."""
    return bootstrap_mean(np.moveaxis(effects, 0, -1), None, totals)


def best_head_items(
    restored: Float[np.ndarray, "n L N"],
    control: Float[np.ndarray, "n L N"],
    totals: Float[np.ndarray, " n"],
    names: Sequence[str],
) -> tuple[ItemScores, list[list[int]]]:
    """What the head restores that restores most in the other half of the pairs, and another pair's activation there;
    layer and head of both halves.
    """
    heads, of_control = (effects.reshape(len(totals), -1).T for effects in (restored, control))
    best = cross_fit(heads, totals)
    scores = {MODEL: best.scores, "another_pair's_activation": best.pick(of_control)}
    items = ItemScores(tuple(names), None, scores, dict.fromkeys(scores, totals))
    return items, [list(divmod(one, restored.shape[2])) for one in best.chosen]


def _unsuited(inputs: SuiteInputs, settings: PatchingSettings) -> str | None:
    is_causal = inputs.model.config.direction != "bidirectional"
    return "a causal model does not predict masked tokens" if is_causal else None


def run(inputs: SuiteInputs, settings: PatchingSettings) -> SuiteResult:
    """What each activation restores, beside what the same activation of another pair does.

    Raises:
      UnsuitedError: no pair can be patched.
      UserError: malformed pairs.
    """
    model = inputs.model
    drawn = draw_pairs(read_pairs(inputs.files(FOLDER, ".jsonl")), settings.pairs, inputs.seed)
    usable, skipped = encode_equal_lengths(drawn, model, settings.max_length)
    masked = [pair for pair in mask_pairs(usable, model, inputs.progress) if pair is not None]
    skipped["no_effect"] = len(usable) - len(masked)
    donors = choose_donors(masked, inputs.seed)
    chosen = [i for i, donor in enumerate(donors) if donor >= 0]
    skipped["no_other_of_its_length"] = len(masked) - len(chosen)
    if not chosen:
        reasons = ", ".join(f"{reason} {count}" for reason, count in skipped.items() if count)
        raise UnsuitedError(f"none of {len(drawn)} minimal pairs can be patched ({reasons})")
    pairs = [masked[i] for i in chosen]
    totals = np.array([pair.effect for pair in pairs])
    restored = measure(model, pairs, [pair.clean for pair in pairs], inputs.progress, "patches")
    others = [masked[donors[i]].clean for i in chosen]
    control = measure(model, pairs, others, inputs.progress, "patches of other pairs")
    difference = jax.tree.map(np.subtract, restored, control)
    names = [pair.item for pair in pairs]
    best_items, best_heads = best_head_items(restored.by_head, control.by_head, totals, names)

    def of(effects: Effects) -> dict[str, Any]:
        found = {site: shares(values, totals) for site, values in effects.by_position.items()}
        found[CONTEXT] = shares(effects.by_head, totals)
        return {site: one._asdict() | {"half_width": one.half_width} for site, one in found.items()}

    return {
        "seed": inputs.seed,
        "pairs": len(pairs),
        "drawn": len(drawn),
        "skipped": dict(skipped),
        "roles": list(ROLES),
        "total_effect_nats": bootstrap_mean(totals)._asdict(),
        "model": of(restored),
        "another_pair": of(control),
        "difference": of(difference),
        "best_heads_of_halves": best_heads,
        ITEMS: {BEST_HEAD: best_items},
    }


SUITE = Suite("patching", PatchingSettings, (FOLDER,), run, blocks, scalars, needs_mlm_head=True, unsuited=_unsuited)
