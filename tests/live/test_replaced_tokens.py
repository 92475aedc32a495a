"""Replaced-token detection beside a twin of transformers' ElectraForMaskedLM and ElectraForPreTraining.

Needs the extra `parity`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.convert.translate import NativeModel, moments_to_huggingface, to_huggingface
from bert_jax.model.generator import discriminator_params, generator_heads, generator_params
from bert_jax.objectives import replaced_tokens
from bert_jax.objectives.objectives import _inputs
from bert_jax.training.pretraining_task import heads_of
from bert_jax.training.programs import combine
from tests.live.small_models import BESIDE_TRANSFORMERS
from tests.objectives.masking_batches import make_batch
from tests.objectives.test_replaced_tokens import SEED, params_of, task_with

pytestmark = BESIDE_TRANSFORMERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

WEIGHT = 50.0
PACKS = [[(1, 32)], [(2, 20)], [(3, 27)], [(4, 11)]]


def open_in_torch(model: NativeModel):
    """The model in its class of transformers, without dropout."""
    hf_model = to_huggingface(model, "test")
    (name,) = hf_model.config["architectures"]
    twin = getattr(transformers, name)(transformers.ElectraConfig(**hf_model.config)).eval()
    state = {key: torch.tensor(np.array(hf_model.tensors[key])) for key in hf_model.tensors}
    missing, unexpected = twin.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"generator_lm_head.weight"}
    twin.tie_weights()
    return twin


@pytest.mark.parametrize("embeddings", ["shared", "disentangled"])
def test_losses_logits_and_gradients(embeddings):
    """On the same samples, to 1e-4; with shared embeddings the twins have one module of embeddings."""
    task, params = task_with(embeddings), jax.tree.map(lambda x: 0.3 * x, params_of(embeddings))
    batch = task.prepare(make_batch(PACKS, 32), SEED)
    generator_model, settings = task.config.generator_of(0), task.config.model
    parts = {
        "generator": NativeModel("electra", generator_model, generator_heads(generator_model), {}),
        "discriminator": NativeModel("electra", settings, heads_of(task.config), {}),
    }
    take = {"generator": generator_params, "discriminator": discriminator_params}
    models = task.models(params)
    twins = {
        name: open_in_torch(part._replace(params=jax.tree.map(np.asarray, take[name](params, embeddings))))
        for name, part in parts.items()
    }
    generator, discriminator = twins["generator"], twins["discriminator"]
    if embeddings == "shared":
        generator.electra.embeddings = discriminator.electra.embeddings
        generator.generator_lm_head.weight = discriminator.electra.embeddings.word_embeddings.weight

    # The generator.
    ids = {name: torch.tensor(np.array(batch[name])) for name in ("input_ids", "token_type_ids", "target_labels")}
    mask = torch.tensor(np.array(batch["segment_ids"])).long()
    positions = torch.tensor(np.array(batch["target_positions"])).long()
    real = np.array(batch["target_weights"]) > 0
    hf_logits = generator(ids["input_ids"].long(), mask, ids["token_type_ids"].long()).logits
    hf_logits = torch.take_along_dim(hf_logits, positions[:, :, None], dim=1)
    hf_generator_loss = torch.nn.functional.cross_entropy(hf_logits[real], ids["target_labels"].long()[real])
    output = models.generator.encoder(_inputs(batch), positions=batch["target_positions"])
    logits = models.generator.mlm(output.hidden, models.generator.encoder.embeddings.decoder_table())
    np.testing.assert_allclose(np.asarray(logits)[real], hf_logits.detach().numpy()[real], atol=1e-4)

    # Its samples.
    sampled = replaced_tokens.sample_tokens(logits, batch["sample_keys"])
    theirs = replaced_tokens.sample_tokens(jnp.asarray(hf_logits.detach().numpy()), batch["sample_keys"])
    np.testing.assert_array_equal(np.asarray(sampled)[real], np.asarray(theirs)[real])
    corrupted = replaced_tokens.place_tokens(batch, sampled)
    assert 0.1 < float(corrupted["is_replaced"].sum()) / real.sum() <= 1

    # The discriminator, with the loss of transformers, over all tokens but padding.
    hf_output = discriminator(
        torch.tensor(np.array(corrupted["input_ids"])).long(),
        mask,
        ids["token_type_ids"].long(),
        labels=torch.tensor(np.array(corrupted["is_replaced"])),
    )
    found = models.model.task(models.model.encoder(_inputs(corrupted)).hidden)[..., 0]
    tokens = mask.numpy() > 0
    np.testing.assert_allclose(np.asarray(found)[tokens], hf_output.logits.detach().numpy()[tokens], atol=1e-4)

    # The losses.
    weights = task.loss_weight_sums(batch)
    sums = task.sums(params, batch, None)
    means = {name: float(sums[name].sum / sums[name].weight) for name in weights}
    np.testing.assert_allclose(means["generator_loss"], float(hf_generator_loss.detach()), rtol=1e-5)
    np.testing.assert_allclose(means["rtd_loss"], float(hf_output.loss.detach()), rtol=1e-5)

    # The gradients.
    (hf_generator_loss + WEIGHT * hf_output.loss).backward()
    gradients = jax.grad(lambda params: combine(task.sums(params, batch, None), weights))(params)
    # That of a difference of tables is that of the discriminator's table.
    modes = {"generator": embeddings, "discriminator": "shared"}
    compared = 0
    for name, part in parts.items():
        tree = jax.tree.map(np.asarray, take[name](gradients, modes[name]))
        ours = moments_to_huggingface(part._replace(params=tree), tree)
        for path, parameter in twins[name].named_parameters():
            if path in ours:
                gradient = parameter.grad.numpy()
                assert np.abs(gradient).max() > 0, path
                limit = 1e-4 * max(1.0, float(np.abs(gradient).max()))
                np.testing.assert_allclose(ours[path], gradient, atol=limit, err_msg=f"{name} {path}")
                compared += 1
    assert compared == 55
