"""BERT-Mini: 4 layers of width 256.

Paper: Turc et al. 2019, "Well-Read Students Learn Better" (sizes); Devlin et al. 2019 (recipe).
Command: bert-jax pretrain bert_mini --corpus DIR --workdir DIR
Expected: GLUE test 65.8 after 1M steps on Wikipedia and BooksCorpus, by the paper; not run here.
Parameters: 11,170,560 with encoder and pooler, 11,267,900 with both heads (vocabulary of 30,522).
"""

from bert_jax.config import Config, Phase
from bert_jax.model import families


def config() -> Config:
    """BERT-Mini."""
    return Config(
        name="bert_mini",
        model=families.bert(num_layers=4, hidden_size=256),
        # One linear decay over 1,000,000 steps, 90 % of them on short rows: phase 1 begins at a tenth of the peak.
        phases=(
            Phase(
                steps=900_000,
                seq_len=128,
                batch_size=256,
                learning_rate=1e-4,
                warmup_steps=10_000,
                end_learning_rate=1e-5,
            ),
            Phase(steps=100_000, seq_len=512, batch_size=256, learning_rate=1e-5, warmup_steps=0),
        ),
    )
