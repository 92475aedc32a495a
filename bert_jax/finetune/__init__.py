"""Fine-tuning: tasks, their metrics and predictions."""
