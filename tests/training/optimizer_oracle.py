"""All optimizers written out in numpy, in float64, one logical tensor at a time; and a small model to run them on."""

import collections
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from bert_jax.config import OptimizerConfig

SHAPES = {
    "encoder/embeddings/word": (12, 6),
    "encoder/embeddings/norm/scale": (6,),
    "encoder/layers/qkv/kernel": (2, 6, 3, 2, 4),
    "encoder/layers/qkv/bias": (2, 3, 2, 4),
    "encoder/layers/down/kernel": (2, 4, 6),
    "encoder/layers/down/bias": (2, 6),
    "mlm/transform/kernel": (6, 6),
    "mlm/bias": (12,),
    "encoder/layers/attention_out/kernel": (2, 2, 4, 6),
}
STEPS = 50


def start() -> dict[str, np.ndarray]:
    """Layers, and queries, keys and values, of very different size: a ratio for all of them together would show.
    A bias of zero: its ratio is 1.
    """
    rng = np.random.default_rng(0)
    params = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in SHAPES.items()}
    for name in params:
        if "/layers/" in name:
            params[name][1] *= 5
    params["encoder/layers/qkv/kernel"][:, :, 2] *= 10
    params["mlm/bias"][:] = 0
    return params


def gradients_of(step: int) -> dict[str, np.ndarray]:
    """Noise around a mean; every third is too small to be clipped at 1."""
    noise = np.random.default_rng([1, step])
    size = 0.01 if step % 3 == 2 else 0.3
    return {n: (size * noise.normal(0.5, 1, shape)).astype(np.float32) for n, shape in SHAPES.items()}


def learning_rate_of(step: int) -> np.float32:
    """Some rise and a fall."""
    return np.float32(0.01 * min(step / 5, 1 - step / STEPS))


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dict from slash-separated names."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *sections, last = name.split("/")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree


def logical_tensors(name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors that a paper would count, as views, each with its group: layers, and their Q, K and V."""
    if "/layers/" not in name:
        yield ("embeddings" if "/embeddings/" in name else "heads"), array
        return
    for i, layer in enumerate(array):
        parts = [layer] if "qkv" not in name else [layer[:, p] if "kernel" in name else layer[p] for p in range(3)]
        for part in parts:
            yield f"layer_{i:02d}", part


def train(
    config: OptimizerConfig,
    params: dict[str, np.ndarray],
    gradients_of: Callable[[int], dict[str, np.ndarray]] = gradients_of,
    frozen: tuple[str, ...] = (),
    scales: Mapping[str, float] | None = None,
    group_scales: Mapping[str, float] | None = None,
) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
    """Parameters after `STEPS` steps, and the metrics of each step.

    AdamW by Loshchilov and Hutter 2019; LAMB by algorithm 2 of You et al. 2020 with its flavours; StableAdamW by
    algorithm 2 of Wortsman et al. 2023; Muon as its authors' code, with the size of Liu et al. 2025. Learning rates are
    multiplied by `scales` of arrays and by `group_scales` of embeddings and single layers.
    """
    params = {name: array.astype(np.float64) for name, array in params.items()}
    m, v, momentum = ({name: np.zeros_like(array) for name, array in params.items()} for _ in range(3))
    lamb, google, paper = config.name == "lamb", config.lamb_flavour == "google", config.lamb_flavour == "paper"
    corrected = not (lamb and google) if config.bias_correction is None else config.bias_correction
    records = []
    for step in range(STEPS):
        gradients = {n: g.astype(np.float64) for n, g in gradients_of(step).items() if n not in frozen}
        squares = collections.defaultdict(lambda: collections.defaultdict(float))
        ratios = []
        for name, gradient in gradients.items():
            for group, tensor in logical_tensors(name, gradient):
                squares["gradient"][group] += np.square(tensor).sum()
        norm = np.sqrt(sum(squares["gradient"].values()))
        clip = 1.0 if config.clip_norm is None else min(1.0, config.clip_norm / norm)
        for name, gradient in gradients.items():
            decayed = name.endswith(("kernel", "word"))
            m[name] = config.beta1 * m[name] + (1 - config.beta1) * clip * gradient
            v[name] = config.beta2 * v[name] + (1 - config.beta2) * (clip * gradient) ** 2
            mean = m[name] / (1 - config.beta1 ** (step + 1)) if corrected else m[name]
            square = v[name] / (1 - config.beta2 ** (step + 1)) if corrected else v[name]
            direction = mean / (np.sqrt(square) + config.epsilon)
            if config.name == "muon" and "/layers/" in name and decayed:
                beta = config.muon_momentum
                momentum[name] = beta * momentum[name] + (1 - beta) * clip * gradient
                direction = (1 - beta) * clip * gradient + beta * momentum[name]
                for _, tensor in logical_tensors(name, direction):
                    tensor[...] = orthogonal(tensor, 2 if "attention_out" in name else 1)
            update = direction + decayed * config.weight_decay * params[name]
            rate = float(learning_rate_of(step)) * (scales or {}).get(name, 1.0)
            scaled_squares = (clip * gradient) ** 2 / np.maximum(square, config.epsilon**2)
            tensors = [logical_tensors(name, array) for array in (params[name], update, scaled_squares)]
            for (group, weights), (_, change), (_, scaled) in zip(*tensors, strict=True):
                ratio = 1.0
                if lamb and (decayed or paper):
                    sizes = np.linalg.norm(weights), np.linalg.norm(change)
                    most = np.inf if config.max_trust_ratio is None else config.max_trust_ratio
                    ratio = np.clip(sizes[0] / sizes[1], config.min_trust_ratio, most) if min(sizes) > 0 else 1.0
                elif config.name == "stable_adamw":
                    ratio = 1 / max(1.0, np.sqrt(scaled.mean()))
                if config.name == "stable_adamw" or (lamb and (decayed or paper)):
                    sizes = np.linalg.norm(weights), np.linalg.norm(change)
                    ratios.append(ratio)
                    squares["adapted"][group] += (ratio * sizes[1]) ** 2
                    squares["plain"][group] += sizes[1] ** 2
                step_size = rate * (group_scales or {}).get(group, 1.0) * ratio
                weights -= step_size * change
                squares["update"][group] += np.square(step_size * change).sum()
        for name, array in params.items():
            for group, weights in logical_tensors(name, array):
                squares["weights"][group] += np.square(weights).sum()
        records.append(_metrics(squares, ratios))
    return params, records


def orthogonal(tensor: np.ndarray, inputs: int) -> np.ndarray:
    """A tensor of (inputs, outputs) axes after five quintic iterations, by its singular values, with Muon's size."""
    matrix = tensor.reshape(int(np.prod(tensor.shape[:inputs])), -1)
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt(np.square(values).sum())
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (0.2 * np.sqrt(max(matrix.shape)) * (left * values) @ right).reshape(tensor.shape)


def _metrics(squares: Mapping[str, Mapping[str, float]], ratios: list[float]) -> dict[str, float]:
    total = {what: np.sqrt(sum(groups.values())) for what, groups in squares.items()}
    metrics = {"skipped": 0.0, "gradient_norm": total["gradient"], "update_norm": total["update"]}
    metrics["parameter_norm"] = total["weights"]
    for group, weights in squares["weights"].items():
        metrics[f"gradient_norm/{group}"] = np.sqrt(squares["gradient"][group])
        metrics[f"update_ratio/{group}"] = np.sqrt(squares["update"][group] / weights)
        if ratios:
            plain = squares["plain"][group]
            metrics[f"trust_ratio/{group}"] = np.sqrt(squares["adapted"][group] / plain) if plain else 1.0
    return metrics | ({"trust_ratio_min": min(ratios), "trust_ratio_max": max(ratios)} if ratios else {})


def distances(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """|found - expected| / |expected| of each logical tensor, as "name[i]"."""
    relative = {}
    for name, array in expected.items():
        pairs = zip(logical_tensors(name, np.asarray(found[name])), logical_tensors(name, array), strict=True)
        for i, ((_, ours), (_, theirs)) in enumerate(pairs):
            relative[f"{name}[{i}]"] = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    return relative
