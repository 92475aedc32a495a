"""The section of the page about fine-tuning, and its numbers over checkpoints."""

from collections.abc import Mapping

import numpy as np

from bert_jax.analysis.suite import Result, Scalar
from bert_jax.report import Block, Curves, Heatmap, Note, Series, Table
from bert_jax.training.param_paths import LAYERS

STATE = "hidden state (0: embeddings)"


def scalars(result: Result) -> Mapping[str, Scalar]:
    """Numbers to draw over checkpoints."""
    similarity = result["similarity"]

    def with_random(key: str) -> Scalar:
        base, random = (similarity[name][key] for name in ("base", "random_weights"))
        return Scalar(base[-1], {"random weights": random[-1]})

    attention = [float(np.mean(similarity[name]["attention_cosine"])) for name in ("base", "random_weights")]
    scores = {"random body": result["random_body_score"], "best constant": result["best_constant_score"]}
    return {
        "CKA with the base, last state": with_random("cka_of_tokens"),
        "cosine of tokens with the base, last state": with_random("cosine_of_tokens"),
        "attention cosine with the base, mean of heads": Scalar(attention[0], {"random weights": attention[1]}),
        "score": Scalar(result["restored_score"][0], scores),
        "score with the base's body": Scalar(result["restored_score"][-1], scores),
    }


def blocks(result: Result) -> tuple[Block, ...]:
    """Question, figures, tables, and how to read them."""
    similarity = result["similarity"]
    return (
        Note("What does fine-tuning change, in which layers, and does the task need it?"),
        Note(
            f"Task {result['task']}: vectors of {similarity['tokens']:,} tokens and attention in "
            f"{result['compared_examples']:,} examples of dev; losses over {result['loss_examples']['train']:,} "
            f"examples of train and {result['loss_examples']['dev']:,} of dev; seed {result['seed']}. Head and pooler "
            "are those of the fine-tuned model at every point: a pretrained model has no task head."
        ),
        *_similarities(result),
        *_distances(result),
        *_restored(result),
        *_surface(result),
        Note(
            "A layer that changes little may still matter, and a large change of weights need not change what is "
            "computed. Linear CKA ignores rotations, the cosine does not. A head was trained on the fine-tuned last "
            "state, so a low score with restored layers shows what this head needs, not what the restored body lacks. "
            "Line and plane are two of very many directions: a flat plane does not show a flat minimum."
        ),
    )


def _similarities(result: Result) -> list[Block]:
    similarity, x = result["similarity"], tuple(range(result["layers"] + 1))
    names = {"cosine_of_tokens": "cosine, tokens", "cosine_of_cls": "cosine, [CLS]", "cka_of_tokens": "CKA, tokens"}
    series = []
    for which, label in (("base", ""), ("random_weights", ", random weights")):
        for color, (key, name) in enumerate(names.items()):
            values = tuple(similarity[which][key])
            series.append(Series(f"{name}{label}", x, values, dashed=which != "base", color=color))
    attention = similarity["base"]["attention_cosine"]
    layers, heads = (tuple(map(str, range(size))) for size in np.shape(attention))
    rows = [
        (
            str(state),
            *(
                f"{similarity['base'][key][state]:.3f} ({similarity['random_weights'][key][state]:.3f})"
                for key in names
            ),
            ""
            if state == 0
            else f"{np.mean(attention[state - 1]):.3f} "
            f"({np.mean(similarity['random_weights']['attention_cosine'][state - 1]):.3f})",
        )
        for state in x
    ]
    return [
        Curves("Similarity to the pretrained model", tuple(series), STATE, "similarity"),
        Heatmap("Cosine of attention maps", tuple(map(tuple, attention)), layers, heads, "layer", "head", "cosine"),
        Table(("state (random weights)", *names.values(), "attention of the layer below"), tuple(rows)),
    ]


def _distances(result: Result) -> list[Block]:
    distances = result["parameter_distance"]
    stacked = {path.removeprefix(LAYERS): by_layer for path, by_layer in distances.items() if path.startswith(LAYERS)}
    kernels = {path: by_layer for path, by_layer in stacked.items() if path.endswith("/kernel")}
    values = np.array(list(kernels.values())).T
    columns = tuple(path.removesuffix("/kernel") for path in kernels)
    rows = [(path, f"{one:.4f}") for path, one in distances.items() if not path.startswith(LAYERS)]
    rows += [(f"{LAYERS}{path} (mean of layers)", f"{np.mean(by_layer):.4f}") for path, by_layer in stacked.items()]
    return [
        Heatmap(
            "Change of the weights, relative to their length",
            tuple(map(tuple, values.tolist())),
            tuple(map(str, range(len(values)))),
            columns,
            "layer",
            "matrix",
            "relative distance",
        ),
        Table(("tensor", "relative distance"), tuple(rows)),
    ]


def _restored(result: Result) -> list[Block]:
    scores, losses = result["restored_score"], result["restored_loss"]
    x = tuple(range(len(scores)))
    series = (
        Series("early parts restored", x, tuple(scores)),
        Series("body of random weights", x, (result["random_body_score"],) * len(x), dashed=True),
        Series("best constant", x, (result["best_constant_score"],) * len(x), dashed=True),
    )
    names = ["nothing", "embeddings", *(f"embeddings and {k} of {len(x) - 2} layers" for k in range(1, len(x) - 1))]
    rows = [
        (name, f"{value:.4f}", f"{loss['train']:.4f}", f"{loss['dev']:.4f}")
        for name, value, loss in zip(names, scores, losses, strict=True)
    ]
    random = result["random_body_loss"]
    rows.append(
        ("random weights", f"{result['random_body_score']:.4f}", f"{random['train']:.4f}", f"{random['dev']:.4f}")
    )
    rows.append(("best constant prediction", f"{result['best_constant_score']:.4f}", "", ""))
    label = "restored parts (1: embeddings, then layers from below)"
    return [
        Curves("Score with early parts set back to the pretrained ones", series, label, result["metric"]),
        Table(("restored", "score", "loss, train", "loss, dev"), tuple(rows)),
    ]


def _surface(result: Result) -> list[Block]:
    line = tuple(result["line"])
    order = np.argsort(line)
    series = tuple(
        Series(name, tuple(line[i] for i in order), tuple(result["line_loss"][i][name] for i in order))
        for name in ("train", "dev")
    )
    labels = tuple(f"{value:g}" for value in result["plane"])
    second = {
        "random": "a random direction of the same length, filter-normalised",
        "other": "to the other fine-tuned model, which is at (0, 1)",
    }[result["second_direction"]]
    return [
        Curves("Loss on the line", series, "0: pretrained body, 1: fine-tuned", "loss"),
        Heatmap(
            "Loss on the plane (train)",
            tuple(map(tuple, result["plane_loss"][::-1])),
            labels[::-1],
            labels,
            second,
            "from pretrained (0) to fine-tuned (1)",
            "loss",
        ),
    ]
