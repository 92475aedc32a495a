"""The peer of `scripts/benchmarks/bench_finetune.py`: `transformers`' sequence classification, trained by PyTorch.

It has the weights of a run of bert_jax, its new head included, takes the same examples in the same steps, and pads them
to the longest of the batch. SDPA attention and fused AdamW, as in the library's `Trainer`.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

from bert_jax.bench.transformers_step import fused_adamw
from bert_jax.errors import UserError
from bert_jax.finetune.encoding import EncodedExamples
from bert_jax.finetune.seed_run import FinetuneRun
from bert_jax.training.state import InitialParams
from bert_jax.training.time_budget import timed_learning_rate_at


class TransformersRun:
    """The fine-tuning of a run's task by PyTorch.

    Raises:
      UserError: the task is not one of classes.
    """

    def __init__(self, run: FinetuneRun, initial: InitialParams, directory: Path, threads: int):
        """Reads the model.

        Args:
          run: of bert_jax.
          initial: its initial parameters.
          directory: its source in Hugging Face's form.
          threads: of PyTorch.
        """
        if run.data.kind != "classification" or len(run.data.labels) == 1:
            raise UserError("the peer has no head for this task: choose one with classes")
        torch.set_num_threads(threads)
        torch.manual_seed(run.seed)
        self.run, config = run, run.config
        self.model = transformers.AutoModelForSequenceClassification.from_pretrained(
            directory,
            num_labels=len(run.data.labels),
            attn_implementation="sdpa",
            hidden_dropout_prob=config.model.hidden_dropout,
            attention_probs_dropout_prob=config.model.attention_dropout,
        ).train()
        output = initial.params["task"]["output"]
        with torch.no_grad():
            self.model.classifier.weight.copy_(torch.from_numpy(np.array(output["kernel"].T)))
            self.model.classifier.bias.copy_(torch.from_numpy(np.array(output["bias"])))
        settings = config.optimizer
        self.optimizer = fused_adamw(self.model, settings, 0.0)
        self.clip_norm, self.steps = settings.clip_norm, 0

    def step(self) -> torch.Tensor:
        """Take the next step; returns its loss."""
        task = self.run.task
        members = task.train.members(self.steps, task.batch_examples)
        labels = torch.from_numpy(self.run.data.train.labels[members].astype(np.int64))
        for group in self.optimizer.param_groups:
            group["lr"] = timed_learning_rate_at(self.run.config, [], self.steps)
        loss = self.model(**_padded(self.run.data.train, members), labels=labels).loss
        loss.backward()
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return loss.detach()


def _padded(examples: EncodedExamples, members: np.ndarray) -> dict[str, torch.Tensor]:
    """Inputs of `transformers`, padded to the longest example."""
    lengths = examples.lengths[members]
    shape = len(members), int(lengths.max())
    inputs = {name: np.zeros(shape, np.int64) for name in ("input_ids", "token_type_ids", "attention_mask")}
    for row, (member, length) in enumerate(zip(members, lengths, strict=True)):
        span = slice(examples.starts[member], examples.starts[member + 1])
        inputs["input_ids"][row, :length] = examples.input_ids[span]
        inputs["token_type_ids"][row, :length] = examples.token_type_ids[span]
        inputs["attention_mask"][row, :length] = 1
    return {name: torch.from_numpy(array) for name, array in inputs.items()}
